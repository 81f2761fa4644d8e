"""launch/quickstart.sh, with programs in the place of megalite's commands that note how they are called."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config.load import load
from megalite.config.schema import Config
from megalite.config.validate import check

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "megalite-train-tokenizer",
    "megalite-prepare-data",
    "megalite",
    "megalite-plot-metrics",
    "megalite-generate",
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the script runs with one override, and ten times fewer steps."""
    tmp_path = tmp_path_factory.mktemp("quickstart")
    (tmp_path / "bin").mkdir()
    for command in COMMANDS:
        program = tmp_path / "bin" / command
        program.write_text('#!/usr/bin/env bash\nprintf "%q " "${0##*/}" "$@" >> calls\necho >> calls\n')
        program.chmod(0o755)
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / "launch/quickstart.sh", "run.seed=7"],
        env={**os.environ, "PATH": path, "STEPS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]


def configured(call: list[str], ranks: int) -> Config:
    return check(load([str(ROOT / call[2])], call[3:]), ranks)


def test_every_program_is_called_in_its_turn(calls: list[list[str]]) -> None:
    assert [call[0] for call in calls] == [*COMMANDS[:2], "megalite", *COMMANDS[2:]]
    assert len([word for word in calls[0] if word.endswith(".py")]) > 100


def test_eight_ranks_continue_what_two_began(calls: list[list[str]]) -> None:
    bulk, rest = (call for call in calls if call[0] == "megalite")
    first, second = configured(bulk, 2), configured(rest, 8)
    assert str(second.parallel.layout) == "pp 2 · dp_shard 2 · tp 2"
    assert (first.train.steps, second.train.steps) == (110, 120)
    assert first.run == second.run
    assert first.run.seed == 7
    assert (first.model, first.data, first.optim, first.schedule) == (
        second.model,
        second.data,
        second.optim,
        second.schedule,
    )
