"""Hangs and lost ranks, each in a job of its own; the jobs run side by side, because they mostly wait."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm_start import Popen

from megalite.distributed.health.watchdog import between_looks
from megalite.distributed.start.local import log_file

PROGRAM = """
import logging, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from megalite.distributed.health.activity import Activity
from megalite.distributed.start.ranks import find_rank_info
from megalite.distributed.start.meeting import meet
from megalite.distributed.start.start import run_rank, start
from megalite.distributed.health.watchdog import watched

body, timeout, missing, rank_info = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), find_rank_info()
rank = rank_info.rank
logging.basicConfig(filename=f"{rank}.log", format="%(asctime)s %(message)s", level=logging.INFO)

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def main():
    activity, meeting = Activity(), meet(rank_info, 4.0 if missing else 120.0)
    with watched(meeting, rank_info, activity, timeout):
        start(rank_info, "cpu", 300.0, meeting)
        dist.barrier()
        activity("reducing")
        exec(body)
        dist.barrier()
    print(f"rank {rank} ended well")
    return 0

if rank < rank_info.world_size - missing:
    sys.exit(run_rank(main, rank_info))
time.sleep(600)
"""
LAUNCH = """
import sys
from pathlib import Path
from megalite.distributed.start.local import launch
sys.exit(launch("watched_program", sys.argv[2:], int(sys.argv[1]), Path(), "megalite.distributed.start.start"))
"""
LINES = """
import torch
def lines(name, *ranks):
    return dist.new_subgroups_by_enumeration(ranks, group_desc=name)[0]
def gather(x, group):
    dist.all_gather_into_tensor(x.new_empty(2 * len(x)), x, group=group)
activity.step, x = 7, torch.ones(5)
tp, dp = lines("mesh_tp", [0, 1], [2, 3]), lines("mesh_dp", [0, 2], [1, 3])
dist.all_reduce(x, group=tp)
"""
LIMIT = 280  # seconds for all jobs on a busy machine


@dataclass
class Job:
    """A job whose ranks write into `folder`."""

    folder: Path
    processes: list[subprocess.Popen[str]]  # the launcher, or the ranks

    def end(self, *ends: int) -> list[str]:
        """Wait for the processes of these ranks; what they print to stderr. All others are killed."""
        told = [self.processes[index].communicate(timeout=LIMIT)[1] for index in ends or range(len(self.processes))]
        for process in self.processes:
            process.kill()
            process.wait()
        return told

    @property
    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()


def begin(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe)


def under_launcher(folder: Path, body: str, timeout: float) -> Job:
    return Job(folder, [begin(folder, ["-c", LAUNCH, "2", body, str(timeout), "0"])])


def four(folder: Path, body: str, timeout: float) -> Job:
    return Job(folder, [begin(folder, ["-c", LAUNCH, "4", body, str(timeout), "0"])])


def two_missing(folder: Path, body: str, timeout: float) -> Job:
    return Job(folder, [begin(folder, ["-c", LAUNCH, "3", body, str(timeout), "2"])])


def alone(folder: Path, body: str, timeout: float) -> Job:
    """Three ranks that no launcher looks after."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    command = ["-m", "watched_program", body, str(timeout), "0"]
    return Job(folder, [begin(folder, command, RANK=str(r), LOCAL_RANK=str(r), **meeting) for r in range(3)])


JOBS: dict[str, tuple[Callable[[Path, str, float], Job], str, float]] = {
    "asleep": (under_launcher, "activity.step = 7\nif rank == 1: activity('dreaming'); time.sleep(600)", 4),
    "stopped": (under_launcher, "if rank == 1: die(signal.SIGSTOP)", 4),
    "absent": (two_missing, "", 4),
    "busy": (under_launcher, "for _ in range(50 * rank): time.sleep(0.2); activity.tick()", 4),
    "missing": (
        four,
        LINES + "if rank == 3: time.sleep(600)\ndist.all_reduce(x, group=tp)\ndist.all_reduce(x, group=dp)",
        4,
    ),
    "astray": (four, LINES + "reduce = rank != 2\nif reduce: dist.all_reduce(x, group=dp)\nelse: gather(x, dp)", 4),
    "killed": (alone, "if rank == 1: die()", 15),
    "keeper killed": (alone, "if rank == 0: die()", 15),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    with ExitStack() as stack:
        jobs = {}
        for name, (kind, body, timeout) in JOBS.items():
            folder = tmp_path_factory.mktemp("watched")
            (folder / "watched_program.py").write_text(PROGRAM)
            jobs[name] = kind(folder, body, timeout)
            for process in jobs[name].processes:
                stack.enter_context(process)
                stack.callback(process.kill)
        yield jobs


def test_a_hang_tells_what_every_rank_is_doing(jobs: dict[str, Job]) -> None:
    job = jobs["asleep"]
    (told,) = job.end()
    assert job.codes == [5]
    head, blame, *rows = told.splitlines()
    assert re.match(r"  rank 1 on .* has not called barrier, number \d of the group of 2 ranks", blame)
    assert re.fullmatch(r"megalite: rank \d: no progress for 4 s \(train.timeout\)", head)
    assert len(rows) == 2
    (sleeper,) = (row for row in rows if row.startswith("  rank 1 on "))
    assert re.search(r": step 7, dreaming, for \d+ s, at megalite/distributed/start/start.py:\d+ run_rank", sleeper)
    (waiting,) = (row for row in rows if row.startswith("  rank 0 on "))
    assert re.search(r": step 7, reducing, for \d+ s, at .*, in torch.distributed.distributed_c10d.barrier", waiting)
    for rank in (0, 1):
        assert told.partition("no progress")[2].strip() in job.log(rank)
        assert "thread MainThread:\n  File" in job.log(rank)


def test_who_is_missing_from_which_collective_is_told(jobs: dict[str, Job]) -> None:
    job, host = jobs["missing"], socket.gethostname()
    (told,) = job.end()
    assert job.codes == [5]
    missing = [
        f"  rank 3 on {host} has not called all_reduce of float [5], number {number} of the {name} group of "
        f"2 ranks ({ranks}), in which rank {waits} on {host} waits, in step 7; it is at: reducing"
        for number, name, ranks, waits in ((2, "tp", "2-3", 2), (1, "dp", "1, 3", 1))  # it is missing from both
    ]
    assert told.splitlines()[1] in missing


def test_who_calls_another_collective_is_told(jobs: dict[str, Job]) -> None:
    job, host = jobs["astray"], socket.gethostname()
    (told,) = job.end()
    assert job.codes == [5]
    both = f"rank 0 on {host} called all_reduce of float [5]", f"rank 2 on {host} called all_gather of float [5]"
    group = "as number 1 of the dp group of 2 ranks (0, 2), in step 7"
    assert told.splitlines()[1] in {f"  {one} where {other}, {group}" for one, other in (both, both[::-1])}


def test_a_rank_that_does_not_answer_is_lost(jobs: dict[str, Job]) -> None:
    job = jobs["stopped"]
    (told,) = job.end()
    assert job.codes == [5]
    assert f"\n  rank 1 on {socket.gethostname()}: no answer, lost\n" in told
    assert re.search(r"\n  rank 0 on .*: step 0, reducing, for ", told)


def test_who_waits_for_a_busy_rank_goes_on_waiting(jobs: dict[str, Job]) -> None:
    job = jobs["busy"]
    (told,) = job.end()
    assert (job.codes, told) == ([0], "")
    assert "rank 1 ended well" in log_file(job.folder, 1).read_text()
    assert "waiting, but some ranks get on: no progress" in job.log(0)


def test_without_a_launcher_a_killed_rank_is_named_once(jobs: dict[str, Job]) -> None:
    job = jobs["killed"]
    told = job.end()
    assert job.codes == [5, -9, 5]
    assert re.match(r"megalite: rank 0 on .*: rank \d has lost a peer: ", told[0])
    assert f"\n  rank 1 on {socket.gethostname()}: no answer, lost\n" in told[0]
    assert "megalite:" not in told[2]
    assert "rank 1 on" in job.log(2)


def test_the_loss_of_the_rank_that_keeps_the_store_is_told(jobs: dict[str, Job]) -> None:
    job = jobs["keeper killed"]
    told = job.end()
    assert job.codes == [-9, 5, 5]
    what = r"lost the job's key-value store, which rank 0 at 127.0.0.1:\d+ kept: \w"
    assert re.search(rf"^megalite: rank 1 on .*: {what}.*\n  rank 1: step 0, ", told[1], re.MULTILINE)
    assert "megalite:" not in told[2]
    assert re.search(what, job.log(2))


@pytest.mark.parametrize(
    ("timeout", "ranks", "seconds"), [(4, 2, 0.5), (15, 8, 0.75), (600, 2, 1), (600, 1024, 1), (600, 16384, 10)]
)
def test_a_lost_peer_is_asked_for_soon_by_as_many_as_the_store_bears(
    timeout: float, ranks: int, seconds: float
) -> None:
    assert between_looks(timeout, ranks) == pytest.approx(seconds, abs=0.3)


def test_ranks_that_do_not_come_are_named(jobs: dict[str, Job]) -> None:
    job = jobs["absent"]
    (told,) = job.end()
    assert job.codes == [5]
    assert told == "megalite: rank 0: lost a peer: rank 1, 2 did not come within 4 s (train.timeout)\n"
