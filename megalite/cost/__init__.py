"""Seconds: clusters, networks, kernels, and the time of a step that follows from a plan. It imports no torch."""
