"""The scripts of the quick start and of the ladder's data; programs that note their calls stand for megalite."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def called(folder: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """What a script runs."""
    (folder / "bin").mkdir()
    for command in COMMANDS:
        program = folder / "bin" / command
        program.write_text('#!/usr/bin/env bash\nprintf "%q " "${0##*/}" "$@" >> calls\necho >> calls\n')
        program.chmod(0o755)
    shutil.copytree(ROOT / "launch", folder / "launch")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", folder / "launch" / script, *arguments],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the script runs with one override, and ten times fewer steps."""
    return called(tmp_path_factory.mktemp("quickstart"), "quickstart.sh", "run.seed=7", STEPS="120")


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


def test_the_ladder_has_its_data_where_it_looks_for_it(calls: list[list[str]], tmp_path: Path) -> None:
    tokenizer, data = called(tmp_path, "ladder_data.sh")
    ladder = yaml.safe_load((ROOT / "configs/experiment/ladder_5x4.yaml").read_text())["set"]
    assert tokenizer[tokenizer.index("--out") + 1] == ladder["data"]["tokenizer"]
    assert tokenizer[tokenizer.index("--vocab-size") + 1] == str(ladder["model.vocab_size"])
    assert data[data.index("--out") + 1] + "_train" == ladder["data"]["train"][0]["path"]
    assert tokenizer[1 : tokenizer.index("--out")] == calls[0][1 : calls[0].index("--out")]  # the same text
