"""Check of a run by `megalite train --check`: users see bad input on the login node, not when the job begins."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import UserError
from ..base.outcome import BAD_INPUT

PATIENCE = 600.0  # seconds: a large data set is scanned once


@dataclass(frozen=True)
class CheckedRun:
    """Run that would start, as a check has found it."""

    ranks: int
    layout: str
    folder: Path  # folder of the run, absolute
    steps: str  # as in `40 to 1000`


class CheckFailed(Exception):
    """The check has told the user what is wrong. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def resolve(megalite: str, arguments: Sequence[str]) -> list[str]:
    """The command that prints the configuration `arguments` as one YAML file."""
    return [megalite, "train", "--resolved", "--", *arguments]


def resolved(megalite: str, arguments: Sequence[str]) -> str:
    """The configuration `arguments` as one YAML file. Raises UserError when it cannot be had."""
    command = resolve(megalite, arguments)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{megalite} train --resolved: has not ended well: {error}") from error
    if done.returncode or not done.stdout:
        raise UserError(f"{megalite}: is not this version's megalite; give --megalite PATH")
    return done.stdout


def find_megalite(given: str | None) -> str:
    """The `megalite` command: the given one, that beside this Python, or that on the PATH. Raises UserError."""
    beside = Path(sys.executable).with_name("megalite")
    found = given or (str(beside) if beside.exists() else shutil.which("megalite"))
    if found is None:
        raise UserError("megalite: is not on the PATH; activate its environment, or give --megalite PATH")
    if shutil.which(found) is None:
        raise UserError(f"--megalite {found}: is no program; give the path of the command megalite")
    return found


def check(megalite: str, arguments: Sequence[str], ranks: int | None) -> CheckedRun:
    """Check the configuration `arguments`, as `megalite train` takes it. ranks: None for as many as the layout has.

    Raises CheckFailed when the check has told what is wrong, and UserError when it cannot be made.
    """
    size = [] if ranks is None else ["--world-size", str(ranks)]
    command = [megalite, "train", "--check", *size, "--", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    except OSError as error:
        raise UserError(f"{megalite}: cannot be run: {error.strerror}; give --megalite PATH") from error
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{megalite} train --check: has not ended within {PATIENCE:g} s; is the file system well?"
        ) from None
    if done.returncode:
        raise CheckFailed(done.returncode if done.returncode > 0 else BAD_INPUT)
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if len(line.split(maxsplit=1)) == 2)
    try:
        return CheckedRun(int(told["ranks"]), told["layout"], Path(told["folder"]).absolute(), told["steps"])
    except (KeyError, ValueError):
        raise UserError(
            f"{megalite}: is not this version's megalite: {done.stdout[:200]!r}; give --megalite PATH"
        ) from None
