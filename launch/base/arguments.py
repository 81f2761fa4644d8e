"""Types of arguments for argparse: each refuses what is wrong with the value and the rule. And options of clusters."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable

MAX_DIGITS = 12  # digits of a whole number, at most
SIZE = re.compile(r"(\d+\.?\d*) ?([KMGTP]?)(I?)B?", re.IGNORECASE)
POWERS = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(text: str) -> int:
        found = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else -1
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.40} must be a whole number from {least:,} to {most:,}")
        return found

    return read


natural = whole(0, 10**9)
count = whole(1, 10**6)
port = whole(1, 65535)


def above_zero(what: str = "a number above 0", most: float = 1e18) -> Callable[[str], float]:
    """A number above 0 and at most `most`; `what` names it in the error."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.40} must be {what}")
        return found

    return read


def byte_size(text: str) -> int:
    """A number of bytes: `350GiB`, `20GB`, `4096`."""
    found = SIZE.fullmatch(text)
    size = float(found[1]) * (1024 if found[3] else 1000) ** POWERS[found[2].upper()] if found else 0.0
    if not 1 <= size < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a size above 0, as 350GiB, 20GB or a number of bytes")
    return int(size)


def seconds(text: str) -> float:
    """Seconds, at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e9:
        raise argparse.ArgumentTypeError(f"{text:.60}: must be seconds, at least 0")
    return found


def words(text: str) -> list[str]:
    """Split a command given as one argument, quoted as for a shell; no shell runs it. Raises ArgumentTypeError."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text:.60}: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError("must not be empty")
    return found


def pair(text: str) -> tuple[str, str]:
    """Split NAME=VALUE at the first `=`. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text:.60}: must be NAME=VALUE")
    return name, value


def cluster_options(way: argparse.ArgumentParser) -> None:
    """Add the options that Slurm and Kubernetes share."""
    way.add_argument("--nodes", type=count, required=True, metavar="N", help="nodes that train")
    way.add_argument("--gpus-per-node", type=count, default=8, metavar="G", help="ranks on each (default: 8)")
    way.add_argument(
        "--unchecked", metavar="RUN", help="megalite is not installed here: give the run's folder, the job checks"
    )
    way.add_argument("--cpus-only", action="store_true", help="ask for no GPUs: the ranks train on CPUs")
