"""What ranks of `megalite train` leave for a supervisor, which has named a folder for their attempt."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_folder import launching, make_toy
from warm_start import Popen, cold

from megalite_launch.base.outcome import Failure, read_failures, read_outcome
from megalite_launch.base.run_folder import ATTEMPT, node_name

LAUNCH = launching("faulty", 2)
FAULTY = """
import os, signal, sys
from itertools import count
from megalite.commands.main import main
from megalite.model.decoder import Decoder

calls, work = count(), Decoder.forward

def faulty(self, *args):
    if os.environ["RANK"] == "1" and next(calls) == 6:
        exec(os.environ["FAULT"])
    return work(self, *args)

Decoder.forward = faulty
sys.exit(main(["train", "toy.yaml", *sys.argv[1:]]))
"""
NAME = "4711.0.0"
TRAIN = ("-m", "megalite", "train", "toy.yaml")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, data, and a program whose rank 1 fails in step 2 as the variable FAULT says."""
    work = tmp_path_factory.mktemp("outcome")
    make_toy(work, parallel={"pp": 2})
    (work / "faulty.py").write_text(FAULTY)
    return work


Job = tuple[subprocess.Popen[str], Path]


def begin(
    work: Path, run: str, *command: str, start: Callable[..., subprocess.Popen[str]] = Popen, **variables: str
) -> Job:
    """Start a command as an attempt of a run. Its process, and the folder of the attempt."""
    attempt = work / "runs" / run / "attempts" / NAME
    attempt.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(work), ATTEMPT: str(attempt), **variables}
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    job = start([*command, f"run.name={run}"], cwd=work, env=environment, stdin=nothing, stdout=pipe, stderr=pipe)
    return job, attempt


def train(work: Path, run: str, *overrides: str) -> Job:
    return begin(work, run, *TRAIN, *overrides)


def faulty(work: Path, run: str, fault: str) -> Job:
    return begin(work, run, "-c", LAUNCH, FAULT=fault)


def wait_until(done: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not done():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    _, told = job.communicate(timeout=120)
    return job.returncode, told


def test_a_run_that_is_done_says_so_and_keeps_logs_by_attempt(work: Path) -> None:
    job, attempt = train(work, "done", "train.steps=3")
    assert end(job) == (0, "")
    outcome = read_outcome(attempt)
    assert outcome is not None
    assert (outcome.code, outcome.step) == (0, 3)
    assert sorted(path.name for path in attempt.iterdir()) == ["met", "outcome.json"]
    logs = work / "runs/done/logs"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        f"{NAME}/{node_name()}-{rank}.log" for rank in (0, 1)
    ]


def test_a_run_that_is_asked_to_stop_tells_the_step_that_is_saved(work: Path) -> None:
    job, attempt = train(work, "stopped", "log.interval=1")
    metrics = work / "runs/stopped/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), job)
    job.send_signal(signal.SIGTERM)
    assert end(job) == (3, "")
    outcome = read_outcome(attempt)
    (saved,) = (work / "runs/stopped/checkpoints").iterdir()
    assert outcome is not None
    assert (outcome.code, f"step-{outcome.step:08d}") == (3, saved.name)
    assert not read_failures(attempt)


def test_a_stop_while_the_launcher_imports_is_an_outcome_too(work: Path) -> None:
    job, attempt = begin(work, "early", *TRAIN, start=cold)
    wait_until(lambda: "libtorch" in Path(f"/proc/{job.pid}/maps").read_text(), job)
    job.send_signal(signal.SIGUSR1)
    assert end(job)[0] == 3
    outcome = read_outcome(attempt)
    assert outcome is not None
    assert (outcome.code, outcome.step) == (3, 0)


def failure(attempt: Path) -> Failure:
    """What a supervisor takes for the cause."""
    assert read_outcome(attempt) is None
    first = read_failures(attempt)[0]
    assert first.node == node_name()
    return first


def test_a_rank_that_fails_reports_its_step_and_the_time_of_the_failure(work: Path) -> None:
    job, attempt = faulty(work, "crash", "import time; print('at', time.time()); raise ValueError('boom')")
    assert end(job)[0] == 1
    first = failure(attempt)
    assert (first.rank, first.code, first.step) == (1, 1, 2)
    assert first.text.endswith("ValueError: boom\n")
    said = (work / f"runs/../{node_name()}-1.log").read_text()  # the launcher of this test has no other folder
    assert 0 <= first.time - float(said.partition("at ")[2].split()[0]) < 1


def test_a_killed_rank_is_reported_by_its_launcher(work: Path) -> None:
    job, attempt = faulty(work, "killed", "os.kill(os.getpid(), signal.SIGKILL)")
    assert end(job)[0] == 5
    first = failure(attempt)
    assert (first.rank, first.code) == (1, 137)
    assert first.text == "killed by SIGKILL; the machine may be out of memory"


def test_bad_input_is_reported_with_its_message(work: Path) -> None:
    job, attempt = train(work, "bad", "optim.lr=-1")
    code, told = end(job)
    first = failure(attempt)
    assert (code, first.code, first.step) == (2, 2, 0)
    assert first.text in told
    assert "optim.lr" in first.text


def test_reports_that_cannot_be_written_change_no_exit_code(work: Path) -> None:
    job, attempt = begin(work, "full", "-c", LAUNCH, FAULT="raise ValueError('boom')", **{ATTEMPT: "/proc/none/1.0.0"})
    code, told = end(job)
    assert (code, "ValueError: boom" in told) == (1, True)
    assert not list(attempt.iterdir())


def test_bad_input_of_a_rank_is_reported_before_it_lets_others_speak(work: Path) -> None:
    attempt = work / "runs/rank/attempts" / NAME
    attempt.mkdir(parents=True)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", ATTEMPT: str(attempt)}
    job = Popen([*TRAIN, "optim.lr=-1"], cwd=work, env={**os.environ, **variables}, stderr=subprocess.PIPE)
    try:
        wait_until((attempt / "fail-00001.json").exists, job)  # the job is still there
        job.send_signal(signal.SIGTERM)  # as a launcher does that has heard from rank 0
        assert end(job) == (2, "")
    finally:
        job.kill()
    assert json.loads((attempt / "fail-00001.json").read_text())["code"] == 2
