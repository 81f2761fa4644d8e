"""Weights and their roles, sizes and FLOPs, and what is scaled with the size of a model."""
