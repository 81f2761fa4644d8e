"""Saving and loading the checkpoints of a run, in the background and in any layout."""
