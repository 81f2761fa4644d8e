"""Checkpoints of runs, and weights of other programs."""
