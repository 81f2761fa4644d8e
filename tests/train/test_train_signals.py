"""Signals to `megalite train`, hangs of its ranks, and what is left of it when it is killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from toy_folder import launching, make_toy
from warm_start import Popen, cold

from megalite.base.stop_signals import STOP_SIGNALS

TRAIN = ["-m", "megalite.commands.main", "train", "toy.yaml"]
LAUNCH = launching("hindered", 2)
SPAWN = launching("hindered", 2, shared=None)
HINDERED = """
import os, sys, time
from itertools import count
from megalite.commands.main import main
from megalite.data.loader import Loader
from megalite.model.decoder import Decoder

rank, calls = int(os.environ["RANK"]), count()

def hinder(owner, name, at):
    work = getattr(owner, name)
    def hindered(self, *args):
        if rank == 1 and next(calls) == at:
            time.sleep(600)
        return work(self, *args)
    setattr(owner, name, hindered)

hinder(*{"forward": (Decoder, "forward", 6), "read": (Loader, "read", 3)}[os.environ["HINDERED"]])
sys.exit(main(["train", "toy.yaml", *sys.argv[1:]]))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a command in a folder with a configuration, data and a program whose rank 1 is hindered."""
    make_toy(tmp_path, parallel={"pp": 2}, train={"timeout": 100})
    (tmp_path / "hindered.py").write_text(HINDERED)

    def begin(command: Sequence[str], start: Begin = Popen, **variables: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), **variables}
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        return start(command, cwd=tmp_path, env=environment, stdin=nothing, stdout=pipe, stderr=pipe)

    yield begin
    for pid in processes(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    """Processes that were started in this folder and are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "cwd").readlink() == folder:  # a zombie has none
                    found.append(int(entry.name))
    return found


def wait_until(done: Callable[[], object], job: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert job is None or job.poll() is None, "the job ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks(folder: Path, launcher: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in processes(folder) if pid != launcher.pid]


@linux
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_first_step_ends_the_job_with_3(
    number: signal.Signals, begin: Begin, tmp_path: Path
) -> None:
    job = begin(TRAIN)
    wait_until(lambda: len(ranks(tmp_path, job)) == 2, job)
    job.send_signal(number)
    _, told = job.communicate(timeout=120)
    assert job.returncode == 3
    assert re.fullmatch(rf"megalite: rank \d: stopped by {number.name} before the first step\n", told)
    assert not processes(tmp_path)
    assert not list(tmp_path.glob("runs/run/checkpoints/step-*"))


@linux
def test_a_signal_while_ranks_meet_and_build_ends_the_job_with_3(begin: Begin, tmp_path: Path) -> None:
    job = begin(TRAIN)
    wait_until((tmp_path / "runs/run/logs/rank_0000.log").exists, job)
    job.send_signal(signal.SIGUSR1)
    _, told = job.communicate(timeout=120)
    assert job.returncode == 3, told
    assert not processes(tmp_path)


@linux
def test_a_signal_while_the_launcher_imports_ends_the_job_with_3(begin: Begin, tmp_path: Path) -> None:
    job = begin(TRAIN, cold)
    wait_until(lambda: "libtorch" in Path(f"/proc/{job.pid}/maps").read_text(), job)
    assert not ranks(tmp_path, job)
    job.send_signal(signal.SIGTERM)
    _, told = job.communicate(timeout=120)
    assert job.returncode == 3
    assert told == "megalite: stopped by SIGTERM\n"


@linux
@pytest.mark.parametrize(("command", "start"), [(TRAIN, Popen), (["-c", SPAWN], cold)], ids=["forked", "spawned"])
def test_no_process_outlives_a_launcher_that_is_killed_early(
    command: list[str], start: Begin, begin: Begin, tmp_path: Path
) -> None:
    """Killed as soon as the first rank is there, and at a random moment of the start of ranks, forked or not."""
    for delay in (0.0, random.uniform(0, 2.5)):
        job = begin(command, start, HINDERED="read")
        wait_until(lambda: ranks(tmp_path, job), job)  # noqa: B023 - called at once
        time.sleep(delay)
        job.kill()
        job.communicate()
        wait_until(lambda: not processes(tmp_path))
        assert not processes(tmp_path)


@linux
@pytest.mark.parametrize(
    ("work", "row"),
    [
        (
            "forward",
            r"step 2, F\(stage 1, micro-batch 2\) \(entry \d+ of \d+\), for \d+ s, at .*, in __main__.hindered",
        ),
        ("read", r"step 3, reading a batch, for \d+ s, at megalite/data/loader.py:\d+ batches, in threading"),
    ],
)
def test_a_hang_is_told_beside_what_the_other_ranks_wait_for(work: str, row: str, begin: Begin, tmp_path: Path) -> None:
    job = begin(["-c", LAUNCH, "train.timeout=8"], HINDERED=work)
    _, told = job.communicate(timeout=200)
    assert job.returncode == 5, told
    head, *rows = told.splitlines()
    assert head.endswith("no progress for 8 s (train.timeout)")
    blame, *rows = rows
    assert re.match(
        r"  rank 1 on \S+ has not sent or taken a message, in which rank 0 on \S+ waits, in step \d; it is", blame
    )
    for rank in (0, 1):
        kept = json.loads((tmp_path / f"runs/run/logs/flight/rank_{rank:05d}.json").read_text())
        assert kept["rank"] == rank
        assert {call[2] for call in kept["flight"]["calls"]} >= {"all_reduce"}
    assert len(rows) == 2
    by_rank = {row.split()[1]: row for row in rows}
    assert re.search(row, by_rank["1"])
    waiting = (
        r"waiting for RECV_B\(stage 0, micro-batch \d\) from pipeline rank 1 \(rank 1\), which sends it at entry \d+"
    )
    assert re.search(waiting + " of 16, for", by_rank["0"])
    assert not processes(tmp_path)
