"""A run that goes on with other ranks, or with ranks that share out experts otherwise: its curve is any layout's."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from warm_start import Popen, run

from megalite.data.store_writer import StoreWriter
from megalite_launch.base.run_folder import RunFolder

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


EXPERTS = "{count: 4, active: 2, width: 12, scores: sigmoid, correction_rate: 0.01, balance_loss: 0.1}"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(name: str, ranks: int, steps: int, *more: str) -> list[str]:
    return ["-c", LAUNCH, str(ranks), "train", "toy.yaml", f"run.name={name}", f"train.steps={steps}", *more]


def train(folder: Path, name: str, ranks: int, steps: int, *more: str) -> None:
    done = run(command(name, ranks, steps, *more), 120, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def curve(folder: Path, name: str) -> dict[int, list[float]]:
    lines = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    values = ("loss", "grad_norm", "parameter_norm", "tokens")
    return {line["step"]: [line[value] for value in values] for line in lines if "loss" in line}


def prepare(folder: Path) -> None:
    with StoreWriter(folder / "data/train", "<u2") as writer:
        writer.add(np.random.default_rng(0).integers(0, 32, 2000))
    (folder / "toy.yaml").write_text(CONFIG)


def test_fewer_ranks_go_on_with_the_same_samples_and_the_same_curve(tmp_path: Path) -> None:
    prepare(tmp_path)
    train(tmp_path, "alone", 1, 6)
    for ranks, steps in ((3, 2), (2, 4), (3, 6)):
        train(tmp_path, "elastic", ranks, steps)
    expected, found = curve(tmp_path, "alone"), curve(tmp_path, "elastic")
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-12, abs=0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_experts_of_a_killed_run_go_on_where_other_ranks_share_them_out(tmp_path: Path) -> None:
    """Momentum and corrections go with their experts, from two ranks to four and to three that have parts of all."""
    prepare(tmp_path)
    experts, folder = f"model.experts={EXPERTS}", RunFolder(tmp_path / "runs/killed")
    arguments = command("killed", 4, 1_000_000, experts, "parallel.ep=2", "checkpoint.interval=2")
    ranks: list[str] = []
    with Popen(arguments, cwd=tmp_path, env=ENVIRONMENT) as job:
        try:
            deadline = time.monotonic() + 120
            while not folder.newest_step():
                assert job.poll() is None, "the job ended too early"
                assert time.monotonic() < deadline, "the job saved nothing"
                time.sleep(0.05)
            ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            assert len(ranks) == 4
        finally:
            for pid in (job.pid, *map(int, ranks)):
                os.kill(pid, signal.SIGKILL)
    last = folder.newest_step()
    train(tmp_path, "killed", 4, last + 2, experts, "parallel.ep=4")
    train(tmp_path, "killed", 3, last + 4, experts)
    train(tmp_path, "alone", 1, last + 4, experts)
    expected, found = curve(tmp_path, "alone"), curve(tmp_path, "killed")
    assert list(expected) == list(range(1, last + 5))
    assert found.keys() >= expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-12, abs=0.0), step


@pytest.mark.parametrize(("ranks", "code"), [(4, 0), (3, 0), (5, 2)])
def test_a_check_tells_how_many_ranks_can_share_the_global_batch(ranks: int, code: int, tmp_path: Path) -> None:
    prepare(tmp_path)
    check = ["-m", "megalite", "train", "toy.yaml", "--check", "--world-size", str(ranks)]
    done = run(check, 60, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert ("batch.global" in done.stderr) == (code == 2)
