"""A folder with an experiment whose runs are those of `fake_megalite`, and what calls megalite-sweep in it."""

import io
import json
import os
import sys
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megalite_tools.experiment.sweep import main

FAKE = Path(__file__).with_name("fake_megalite.py")
BASE: dict[str, Any] = {
    "run": {"device": "cpu"},
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab_size": 64, "sequence_length": 8},
    "batch": {"micro": 4, "global": 4},
    "train": {"steps": 10, "precision": "fp32"},
    "data": {"train": [{"path": "tokens"}]},
    "log": {"tensorboard": False},
}


class Said(NamedTuple):
    """What a command has printed."""

    stdout: str
    stderr: str


class Faked:
    """The folder."""

    def __init__(self, folder: Path, script: dict[str, Any], **experiment: Any) -> None:
        self.folder = folder
        (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
        self.write(**experiment)
        (folder / "script.json").write_text(json.dumps(script))
        (folder / "journal").touch()
        self.megalite = folder / "megalite"
        self.megalite.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        self.megalite.chmod(0o755)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def write(self, **experiment: Any) -> None:
        about = {"name": "exp", "base": "base.yaml", **experiment.pop("experiment", {})}
        (self.folder / "exp.yaml").write_text(yaml.safe_dump({"experiment": about, **experiment}))

    def script(self, script: dict[str, Any]) -> None:
        (self.folder / "script.json").write_text(json.dumps(script))

    def command(self, *words: str) -> list[str]:
        way, *rest = words
        megalite = ["--megalite", str(self.megalite)] if way == "launch" else []
        return [sys.executable, "-m", "megalite_tools.experiment.sweep", way, "exp.yaml", *megalite, *rest]

    def sweep(self, *words: str, code: int = 0) -> Said:
        """Call megalite-sweep in this process: it takes a second to start."""
        out, err = io.StringIO(), io.StringIO()
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            found = main(self.command(*words)[3:])
        assert found == code, f"{found}: {out.getvalue()}{err.getvalue()}"
        return Said(out.getvalue(), err.getvalue())

    def statuses(self) -> dict[str, dict[str, Any]]:
        """By slug."""
        files = (self.folder / "experiments" / "exp" / "runs").glob("*/status.json")
        return {path.parent.name[:-11]: json.loads(path.read_text()) for path in files}

    def states(self) -> dict[str, str]:
        return {slug: status["state"] for slug, status in self.statuses().items()}

    def journal(self) -> list[tuple[str, str]]:
        """Starts and ends, in their order, each with the slug."""
        lines = (self.folder / "journal").read_text().splitlines()
        return [(line.split()[0], line.split()[1][:-11]) for line in lines]

    def starts(self) -> Counter[str]:
        return Counter(slug for what, slug in self.journal() if what == "start")

    def run_again(self) -> list[str]:
        """Runs that were started after they had been done."""
        done: set[str] = set()
        again = []
        for what, slug in self.journal():
            if what == "end":
                done.add(slug)
            elif slug in done:
                again.append(slug)
        return again
