"""The decoder: one module per kind of layer part, positions, and initial values."""
