"""Errors that end a preflight with a message."""


class BadInput(ValueError):
    """What the user gave cannot be used: one message, exit code 2."""
