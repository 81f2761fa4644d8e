"""Optimizers, the states they keep, and the learning rate."""
