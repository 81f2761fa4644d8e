"""Weights of other programs: opened, converted and exported."""
