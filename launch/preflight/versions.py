"""Commit and packages with which this Python would train, as JSON; imports none of them, so that it takes no time.

The environment that will train runs this file as a program.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from pathlib import Path
from typing import Optional


def versions() -> dict[str, Optional[str]]:
    """commit, megalite, torch, nccl and python; None for what there is not."""
    found: dict[str, Optional[str]] = {
        "commit": _commit(),
        "megalite": _version("megalite"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "nccl": None,
    }
    for distribution in importlib.metadata.distributions():
        if (distribution.metadata["Name"] or "").startswith("nvidia-nccl"):
            found["nccl"] = distribution.version
    return found


def _version(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> Optional[str]:
    """The commit of megalite's checkout, with `-dirty` if it has changes."""
    spec = importlib.util.find_spec("megalite")
    if spec is None or spec.origin is None:
        return None
    command = [
        "git",
        "-C",
        str(Path(spec.origin).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=8)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(versions()))
