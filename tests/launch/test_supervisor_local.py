"""The supervisor on this machine alone, without Slurm."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in

from megalite_launch.base.events import read_events
from megalite_launch.base.outcome import STOPPED, read_outcome
from megalite_launch.base.own_command import PACKAGE
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.supervise.local_backend import processes_of

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, work: SimpleNamespace) -> Iterator[Start]:
    """Starts the supervisor of a stand-in, or of another command; nothing of it is left in the end."""
    started = []

    def start(
        *arguments: str, supervisor: tuple[str, ...] = (), command: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        command = command or (sys.executable, stand_in.__file__, str(tmp_path / "run"))
        how = ("--backend", "local", "--run", str(tmp_path / "run"), "--reap-seconds", "0.5", *supervisor)
        words = [sys.executable, "-m", "megalite_launch", "supervise", *how, "--", *command, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, cwd=work.folder, env=work.environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20  # a supervisor that was killed has its ranks save and end
    while any(left(folder) for folder in (tmp_path / "run" / "attempts").glob("*")):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.1)


def left(attempt: Path) -> list[int]:
    return [process for process in processes_of(attempt) if stand_in.alive(process)]


def causes(run: Path) -> list[str]:
    return [event["cause"] for event in read_events(run / "events.jsonl") if event["event"] == "attempt_ended"]


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_crash_and_a_hang_are_followed_by_another_attempt(start: Start, tmp_path: Path) -> None:
    process = start("--steps", "12", "--fail", "1", "--at", "8", "--once", "--spin")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert causes(tmp_path / "run") == ["crash", "finished"]
    assert "is killed: a rank has failed 0 s ago" in told or "is killed: a rank has failed 1 s ago" in told
    assert stand_in.recorded(tmp_path / "run") == stand_in.curve(12)


def test_the_bound_on_attempts(start: Start, tmp_path: Path) -> None:
    process = start("--fail", "1", "--at", "3", supervisor=("--max-attempts", "2"))
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ends with exit code 1: 2 attempts in a row have saved no newer checkpoint: rank 0 on" in told
    assert causes(tmp_path / "run") == ["crash", "crash"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_saves_and_ends(start: Start, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    process = start("--steps", "100000")
    until(lambda: (run / "metrics.jsonl").exists())
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 3, told
    assert told.strip().endswith("the same command goes on")
    states = stand_in.recorded(run)
    assert states == stand_in.curve(len(states))


def test_ctrl_c_in_a_terminal_saves_and_ends(tmp_path: Path) -> None:
    run, megalite = tmp_path / "run", tmp_path / "megalite"
    checked = f"ranks 1\nlayout tp 1\nfolder {run}\nsteps 0 to 10\n"
    stands_in = shlex.join([sys.executable, stand_in.__file__, str(run), "--steps", "100000"])
    megalite.write_text(
        f"#!/bin/sh\ncase $2 in --check) printf '{checked}' ;; --resolved) echo run: ;; *) exec {stands_in} ;; esac\n"
    )
    megalite.chmod(0o755)
    words = [
        sys.executable,
        str(PACKAGE),
        "launch",
        "local",
        "--megalite",
        str(megalite),
        "c.yaml",
    ]
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (run / "metrics.jsonl").exists())
        os.killpg(process.pid, signal.SIGINT)  # all processes of a terminal hear it
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3, told
    assert causes(run) == ["stopped"]


def test_ranks_of_a_killed_supervisor_save_and_end(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("--steps", "100000")
    until(lambda: (run / "metrics.jsonl").exists())
    process.kill()
    until(lambda: bool(list(run.glob("attempts/*/outcome.json"))))
    outcome = read_outcome(next(run.glob("attempts/*")))
    assert outcome is not None
    assert (outcome.code, RunFolder(run).newest_step()) == (STOPPED, outcome.step)


def test_a_second_supervisor_is_refused_while_the_first_is_there(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start("--steps", "100000")
    until(lambda: (run / "metrics.jsonl").exists())
    _, told = (second := start("--steps", "100000")).communicate(timeout=60)
    assert second.returncode == 2
    assert f"-{first.pid}) is at work in this run folder" in told
    assert len(list((run / "attempts").glob("*"))) == 1  # the second has begun nothing
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 3
    events = read_events(run / "events.jsonl")
    assert [event["event"] for event in events if event["job"].endswith(f"-{second.pid}")] == ["refused"]


def test_the_end_of_the_launcher_of_the_ranks_is_told(start: Start, tmp_path: Path) -> None:
    process = start(command=("sh", "-c", "kill -KILL $$"), supervisor=("--max-attempts", "1"))
    _, told = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "their launcher was killed by SIGKILL" in told


def test_training_itself_is_back_within_ten_seconds(start: Start, work: SimpleNamespace) -> None:
    run = work.folder / "runs" / "restarted"
    config = ("config.yaml", "run.name=restarted", "parallel.pp=1", "parallel.tp=1", "train.steps=1000000")
    process = start(*config, supervisor=("--run", str(run)), command=("megalite", "train"))
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
    (attempt,) = (run / "attempts").glob("*")
    for rank in processes_of(attempt):
        os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: not processes_of(attempt))  # until then, they may report another step
    steps = len(work.losses("restarted"))
    until(lambda: len(work.losses("restarted")) > steps)
    took = time.monotonic() - killed
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 3, told
    assert causes(run) == ["killed", "stopped"]
    assert took < 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--run", "r", "--", "true"), "no SLURM_JOB_ID"),
        (("--run", "r", "--backend", "local", "--preflight", "full", "--", "true"), "needs --preflight-command"),
        (("--run", "r", "--nodes", "2", "--min-nodes", "3", "--", "true"), "must be at most --nodes 2"),
        (("--run", "r", "--reap-seconds", "-1", "--", "true"), "must be seconds, at least 0"),
        (("--run", "r", "--nodes", "x", "--", "true"), "must be a whole number"),
        (("--run", "r", "--check", "'", "--", "true"), "No closing quotation"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "megalite_launch", "supervise", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
