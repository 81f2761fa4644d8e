"""The configuration of a job, frozen beside its script when it was submitted.

All attempts use it, whatever becomes of the files that it was made of. Where these say something else later, the
supervisor tells what differs.
"""

from __future__ import annotations

import difflib
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Optional

from ..base.files import read_bytes
from ..base.outcome import BAD_INPUT, DONE
from ..base.texts import printable

MAX_BYTES = 2**20  # read from the frozen configuration
MAX_LISTED_LINES, LINE_WIDTH = 6, 120  # changed lines that are told, and how much of each


@dataclass
class Frozen:
    """Looks whether the files of a configuration still say what was frozen. Nothing waits for the look.

    used: whether the ranks use what the files say now.
    """

    path: Path
    command: Sequence[str]  # prints the configuration as its files are now
    used: bool
    _process: Optional[subprocess.Popen[bytes]] = field(default=None, init=False)
    _said: Optional[IO[bytes]] = field(default=None, init=False)
    _told: str = field(default="", init=False)

    def look(self) -> None:
        """Begin to look, if no look is under way."""
        if self._process is not None or not self.command:
            return
        with suppress(OSError):
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read when the look is over
            self._process = subprocess.Popen(
                list(self.command), stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.DEVNULL
            )

    def found(self) -> str:
        """Text of the differences, once the look is over; empty before, where there are none, and for what was told."""
        if self._process is None or self._process.poll() is None:
            return ""
        assert self._said is not None
        self._said.seek(0)
        code, now = self._process.returncode, self._said.read().decode(errors="replace")
        self._said.close()
        self._process = None
        text = self._text(code, now)
        text, self._told = ("" if text == self._told else text), text
        return text

    def end(self) -> None:
        """Leave off."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _text(self, code: int, now: str) -> str:
        if code not in (DONE, BAD_INPUT):
            return ""
        try:
            before = read_bytes(self.path, MAX_BYTES).decode(errors="replace")
        except OSError:
            return ""
        if code == DONE and now == before:
            return ""
        what = "is not valid any more" if code else _differences(before, now)
        if self.used:
            return f"the configuration was edited since the job was submitted, and this attempt uses the edit: {what}"
        return (
            f"the configuration was edited since the job was submitted: {what}; not used: all attempts go on with "
            f"{self.path}. To use the edit, end the job and submit it again with megalite-launch"
        )


def _differences(before: str, now: str) -> str:
    """The lines of YAML that differ, with - for what was and + for what is."""
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
    changed = [line for line in list(lines)[2:] if not line.startswith("@@")]
    shown = [printable(f"{line[0]} {line[1:].strip()}", LINE_WIDTH) for line in changed[:MAX_LISTED_LINES]]
    return ", ".join(shown) + (
        f" and {len(changed) - MAX_LISTED_LINES} more lines" if len(changed) > MAX_LISTED_LINES else ""
    )
