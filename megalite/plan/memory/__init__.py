"""The bytes that a rank holds in a training step, and the batch that fits."""
