"""Errors that a user has to fix."""

from __future__ import annotations

from .texts import escaped

MAX_MESSAGE_LENGTH = 8000  # characters


class UserError(Exception):
    """Bad input: the message names the option or file, the value, the rule and a fix. The exit code is 2.

    It may have texts of files as they are: characters that could disturb a terminal are escaped here.
    """

    def __init__(self, text: str) -> None:
        super().__init__(escaped(text[:MAX_MESSAGE_LENGTH]))
