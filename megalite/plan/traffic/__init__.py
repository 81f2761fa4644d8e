"""The collectives and messages of a training step."""
