"""`megalite list`: the models, runs, experiments, clusters and scripts that megalite comes with, or the text of one."""

import argparse
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from megalite.base.errors import InputError
from megalite.base.terminal import console, sections, table
from megalite.config.presets import KINDS, advice, presets

SCRIPTS = ("local.sh", "slurm.sbatch")  # files of megalite_launch
SENTENCE = re.compile(r".*?\.(?=\s|$)")


def run(args: argparse.Namespace) -> int:
    """Print a table of names for each kind, or the text of the files that are named. Returns the exit code."""
    shipped = {kind: presets(kind) for kind in KINDS} | {"script": scripts()}
    if args.arguments:
        known = {name: path for group in shipped.values() for name, path in group.items()}
        if unknown := [name for name in args.arguments if name not in known]:
            raise InputError(f"{unknown[0]:.200}: megalite comes with no such file; {advice(unknown[0], known)}")
        for name in args.arguments:
            print(known[name].read_text(encoding="utf-8"), end="")
        return 0
    shown: list[tuple[str, RenderableType]] = []
    for kind, group in shipped.items():
        rows = table("name", "what it is", text=("name", "what it is"))
        for name, path in group.items():
            rows.add_row(Text(name), Text(purpose(path)))
        shown.append((f"{kind.capitalize()}s", rows))
    sections(console(), shown)
    return 0


def scripts() -> Mapping[str, Path]:
    """Scripts that start a job without a supervisor, by name."""
    package = Path(str(files("megalite_launch")))
    return {name: package / name for name in SCRIPTS}


def purpose(path: Path) -> str:
    """The first sentence of the comment at the top of a file, on one line and without its full stop."""
    lines = path.read_text(encoding="utf-8").removeprefix("#!/usr/bin/env bash\n").splitlines()
    count = next((number for number, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    text = " ".join(line.removeprefix("# ").strip() for line in lines[:count])
    sentence = SENTENCE.match(text)
    return (sentence[0] if sentence else text).rstrip(".:")
