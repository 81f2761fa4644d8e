"""A run that goes on with fewer ranks, and then with all again: the curve is that of any other layout."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from warm_start import run

from megalite.data.store import StoreWriter

CONFIG = """
run: {dir: runs, device: cpu}
model: {layers: 1, width: 16, heads: 2, kv_heads: 2, ffn: 24, vocab_size: 32, sequence_length: 16}
parallel: {dp_shard: auto}
batch: {micro: 1, global: 12}
train: {steps: 6, precision: fp64, timeout: 100}
schedule: {name: constant}
data: {train: [{path: data/train}]}
log: {tensorboard: false, interval: 1}
checkpoint: {keep: 0}
"""
LAUNCH = """
import sys
from pathlib import Path
from megalite.distributed.start.local import launch
sys.exit(launch("megalite.commands.main", sys.argv[2:], int(sys.argv[1]), Path(), "megalite.train.worker"))
"""


def train(folder: Path, name: str, ranks: int, steps: int) -> None:
    command = ["-c", LAUNCH, str(ranks), "train", "toy.yaml", f"run.name={name}", f"train.steps={steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run(command, 120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr


def curve(folder: Path, name: str) -> dict[int, list[float]]:
    lines = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    values = ("loss", "grad_norm", "parameter_norm", "tokens")
    return {line["step"]: [line[value] for value in values] for line in lines if "loss" in line}


def test_fewer_ranks_go_on_with_the_same_samples_and_the_same_curve(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "data/train", "<u2") as writer:
        writer.add(np.random.default_rng(0).integers(0, 32, 2000))
    (tmp_path / "toy.yaml").write_text(CONFIG)
    train(tmp_path, "alone", 1, 6)
    for ranks, steps in ((3, 2), (2, 4), (3, 6)):
        train(tmp_path, "elastic", ranks, steps)
    expected, found = curve(tmp_path, "alone"), curve(tmp_path, "elastic")
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(("ranks", "code"), [(4, 0), (3, 0), (5, 2)])
def test_a_check_tells_how_many_ranks_can_share_the_global_batch(ranks: int, code: int, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "data/train", "<u2") as writer:
        writer.add(np.arange(2000) % 32)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    check = ["-m", "megalite", "train", "toy.yaml", "--check", "--world-size", str(ranks)]
    done = run(check, 60, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert ("batch.global" in done.stderr) == (code == 2)
