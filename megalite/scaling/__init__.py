"""Scaling laws from an experiment's results, with NumPy and without torch."""
