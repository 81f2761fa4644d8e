"""Predictions beside published runs of other programs: rows, profiles, memory, times and scores."""
