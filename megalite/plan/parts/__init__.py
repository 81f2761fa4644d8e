"""The parts of a layer, each described once: weights, products, kept bytes, backward and transfers."""
