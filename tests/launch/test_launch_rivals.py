"""Two supervisors of one run: on this machine, and of a Slurm job that gives signs of life."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite_launch.base.errors import UserError
from megalite_launch.base.events import append_event, read_events
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.slurm import Answer, Slurm
from megalite_launch.submit import launch_command
from megalite_launch.supervise import other_supervisors
from megalite_launch.supervise.batch_host_guard import END_MARK
from megalite_launch.supervise.local_backend import LocalBackend
from megalite_launch.supervise.slurm_backend import Options, SlurmBackend

HOLD = """
import sys
from pathlib import Path
from megalite_launch.supervise import other_supervisors
from megalite_launch.base.run_folder import RunFolder

other_supervisors.lock(RunFolder(Path(sys.argv[1])))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.attempts.mkdir(parents=True)
    return folder


def begin(run: RunFolder, job: str, backend: str) -> None:
    append_event(run.events, "begin", "supervisor", "begins", job=job, restart=0, backend=backend)


def beating(path: Path) -> Callable[[float], None]:
    """In place of a pause: the supervisor gives a sign of life meanwhile."""
    moments = iter(range(1, 1000))
    return lambda _: os.utime(path, ns=(0, next(moments)))


@pytest.mark.parametrize("told", ["", "requeue", "end"])
def test_a_slurm_job_that_gives_signs_of_life_is_a_rival_unless_it_has_told_its_end(run: RunFolder, told: str) -> None:
    begin(run, "7", "slurm")
    beat = run.attempts / "7.0.beat"
    beat.touch()
    if told:
        append_event(run.events, told, "supervisor", "over", job="7", restart=0)
    found = other_supervisors.slurm_rival(run, read_events(run.events), beating(beat))
    assert found == ("" if told else "Slurm job 7")


@pytest.mark.parametrize(
    ("state", "rival"),
    [("RUNNING", True), ("SIGNALING", True), ("SUSPENDED", True), ("PENDING", False), ("COMPLETED", False)],
)
def test_another_job_of_the_run_is_a_rival_while_it_has_nodes(run: RunFolder, state: str, rival: bool) -> None:
    append_event(run.events, "begin", "supervisor", "begins", job="8", restart=0, backend="slurm", cluster="")
    answer = Answer(0, f"JobId=8\n   JobState={state} Reason=None\n   Requeue=1 Restarts=0\n", "")
    job = SlurmBackend(Slurm("7", lambda _: answer), 0, run.path, Options(1), lambda _: None)
    assert job.rival(read_events(run.events)) == ("Slurm job 8" if rival else "")


@pytest.mark.parametrize("text", [None, b"", END_MARK], ids=["no file", "silent", "over"])
def test_a_slurm_job_that_is_dead_is_none(run: RunFolder, text: bytes | None) -> None:
    begin(run, "7", "slurm")
    if text is not None:
        (run.attempts / "7.0.beat").write_bytes(text)
    paused: list[float] = []
    assert other_supervisors.slurm_rival(run, read_events(run.events), paused.append) == ""
    assert sum(paused) == pytest.approx(other_supervisors.MAX_SILENCE if text == b"" else 0)


def test_a_local_launch_beside_a_slurm_job_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, "7", "slurm")
    beat, over = run.attempts / "7.0.beat", threading.Event()
    beat.touch()
    monkeypatch.setattr(other_supervisors, "POLL_SECONDS", 0.01)
    beats = beating(beat)
    thread = threading.Thread(target=lambda: [beats(0) for _ in iter(lambda: over.wait(0.005), True)])
    thread.start()
    try:
        assert LocalBackend(run).rival(read_events(run.events)) == "Slurm job 7"
    finally:
        over.set()
        thread.join()


def test_a_supervisor_of_this_machine_is_a_rival_while_it_lives(run: RunFolder, tmp_path: Path) -> None:
    begin(run, "local-1", "local")
    events = read_events(run.events)
    assert other_supervisors.local_rival(run, events) == ""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert other_supervisors.local_rival(run, events) == "another supervisor (local-1)"
        job = SlurmBackend(Slurm("7"), 0, run.path, Options(1), lambda _: None)
        assert job.rival(events) == "another supervisor (local-1)"
        with pytest.raises(UserError, match=r"another supervisor \(local-1\) is at work"):
            launch_command._refuse_a_second(run)
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    assert other_supervisors.local_rival(run, events) == ""
