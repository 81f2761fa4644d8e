"""`megalite train` that is asked to stop: every signal, from outside."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from toy_folder import make_toy
from warm_start import Popen, run

from megalite.base.stop_signals import STOP_SIGNALS

TRAIN = ["-m", "megalite.commands.main", "train", "toy.yaml"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and data."""
    work = tmp_path_factory.mktemp("stop")
    make_toy(work, model={"layers": 1}, schedule={"name": "constant"})
    return work


def start(work: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    return Popen([*TRAIN, f"run.name={name}", *arguments], cwd=work, stdin=nothing, stdout=pipe, stderr=pipe)


def started(work: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    """A run in its second step since this start, at least."""
    metrics = work / "runs" / name / "metrics.jsonl"
    begun = metrics.stat().st_size if metrics.exists() else 0
    job = start(work, name, *arguments)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"loss"' in metrics.read_text()[begun:]):
        if job.poll() is not None or time.monotonic() > deadline:
            job.kill()
            pytest.fail(f"the run did not begin: {job.communicate()}")
        time.sleep(0.05)
    return job


@pytest.mark.timeout(900)  # six starts; a machine may be busy
def test_every_signal_saves_and_the_same_command_continues(work: Path) -> None:
    """Each start goes on from where the signal before has stopped the run, and the last one is let finish."""
    metrics, step, seen = work / "runs/stopped/metrics.jsonl", 0, 0
    for number in STOP_SIGNALS:
        job = started(work, "stopped", "parallel.dp_shard=2", "checkpoint.keep=1")
        job.send_signal(number)
        told, errors = job.communicate(timeout=60)
        assert (job.returncode, errors) == (3, ""), number
        assert step == 0 or f"resuming at step {step}, sample {8 * step}" in told
        (saved,) = (work / "runs/stopped/checkpoints").iterdir()
        step = int(saved.name.removeprefix("step-"))
        assert f"stopped by {number.name} after step {step}, which is saved; the same command continues" in told
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        events = [line["event"] for line in lines[seen:] if "event" in line]
        assert events == [*["resumed"] * (seen > 0), "saving", "saved", "stopped"]
        assert max(line["step"] for line in lines if "loss" in line) == step
        seen = len(lines)
    job = start(work, "stopped", "parallel.dp_shard=2", f"train.steps={step + 2}")
    told, errors = job.communicate(timeout=120)
    assert (job.returncode, errors) == (0, "")
    assert f"resuming at step {step}, sample {8 * step}" in told


def test_a_second_interrupt_saves_nothing(work: Path) -> None:
    job = started(work, "twice", "batch.global=1024")  # steps that take a second or more
    for _ in range(2):
        job.send_signal(signal.SIGINT)
        time.sleep(0.3)
    job.communicate(timeout=60)
    assert job.returncode == 130
    assert list((work / "runs/twice/checkpoints").glob("step-????????")) == []


def test_numbers_that_are_not_finite_end_the_run_with_one_message(work: Path) -> None:
    arguments = ["run.name=bad", "parallel.dp_shard=2", "train.steps=5", "optim.lr=10", "optim.weight_decay=1e38"]
    done = run([*TRAIN, *arguments], 120, cwd=work)
    assert done.returncode == 4, done.stderr
    (told,) = done.stderr.splitlines()
    assert "step 2, samples 8 to 15: loss nan, gradient norm nan; not finite: the gradients of" in told
    events = [json.loads(line) for line in (work / "runs/bad/metrics.jsonl").read_text().splitlines()]
    bad, *failed = (event for event in events if "event" in event)
    assert (bad["event"], bad["step"], bad["loss"]) == ("bad_step", 2, None)
    for event in failed:  # one, unless rank 1 was so much faster to fail that rank 0 was ended before it could write
        assert (event["event"], event["step"]) == ("failed", 2)
        assert event["reason"] in told
