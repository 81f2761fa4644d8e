"""Report of a failing rank: one message for the user, from the rank that knows the cause. Imports no torch."""

import _thread
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megalite.base.exit_codes import ExitCode
from megalite.base.output import Outlet
from megalite.distributed.start.local import MEETING, error_file
from megalite.distributed.start.ranks import RankInfo
from megalite_launch.base.files import write_whole
from megalite_launch.base.outcome import Failure, read_failures, write_failure, write_met, write_outcome
from megalite_launch.base.run_folder import ATTEMPT, RunFolder, node_name
from megalite_launch.base.texts import escaped

PATIENCE = 5.0  # seconds that a rank which ends waits for a file system to take its report
THREAD_START_SECONDS = 1.0  # seconds that a thread gets to begin
OUTCOME = "MEGALITE_OUTCOME"  # environment: a file for the exit code of the first rank to fail

log = logging.getLogger("megalite")
log.addHandler(logging.NullHandler())  # until the rank's log file is open, nothing is logged


def tell(code: int, text: str, rank_info: RankInfo) -> None:
    """Report an error: to the launcher, if it shows the first error of the job, or else to the user.

    An empty `text` means that `code` is a verdict that needs no explanation.
    """
    note_outcome(code)
    if code == ExitCode.STOPPED:
        note_end(code, rank_info)
    else:
        note_failure(code, text, rank_info)
    told = escaped(text)
    with Outlet("last words"):  # which must not change the exit code
        if MEETING in os.environ:
            try:
                _tell_launcher(code, text, rank_info)
            except OSError:  # a full disk
                print(f"megalite: rank {rank_info.rank}: {told}", file=sys.stderr, flush=True)
                raise
        elif text and (torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            report = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
            write_whole(Path(torchrun), json.dumps({"message": report}))
        elif text:
            print(
                f"megalite: rank {rank_info.rank} on {socket.gethostname()}: {told}",
                file=sys.stderr,
                flush=True,
            )


def note_outcome(code: int) -> None:
    """Write down the exit code of the first rank to fail: Slurm gives the highest of all ranks, torchrun always 1."""
    with suppress(OSError):  # another rank was first, or there is no such folder
        if outcome := os.environ.get(OUTCOME):
            with Path(outcome).open("x") as file:
                file.write(f"{code}\n")


def note_failure(code: int, text: str, rank_info: RankInfo, step: int = 0) -> None:
    """Write down for the supervisor that this rank fails now, and why; before any politeness, as the time counts.

    step: that was under way. Further notes of a failure may only add words to the first.
    """
    if attempt := os.environ.get(ATTEMPT):
        failure = Failure(time.time(), rank_info.rank, node_name(), int(code), step, text)
        briefly(lambda: write_failure(Path(attempt), failure))


def note_meeting(rank_info: RankInfo) -> None:
    """Write down for the supervisor, on rank 0, that all ranks have met."""
    if rank_info.rank == 0 and (attempt := os.environ.get(ATTEMPT)):
        briefly(lambda: write_met(Path(attempt)))


def note_end(code: int, rank_info: RankInfo) -> None:
    """Write down for the supervisor, on rank 0, that the ranks end as they should: with DONE or STOPPED."""

    def write() -> None:
        if not read_failures(folder):  # else Slurm ends the ranks that are left, and has asked nobody to stop
            write_outcome(folder, int(code), RunFolder(folder.parent.parent).newest_step())

    if rank_info.rank == 0 and (attempt := os.environ.get(ATTEMPT)):
        folder = Path(attempt)
        briefly(write)


def briefly(write: Callable[[], None]) -> None:
    """Write a report. Neither a file system that refuses it nor one that hangs may change how this rank ends.

    So a thread writes. Without memory for one, it fails to begin and nobody says so (`Thread.start` would wait for
    ever); then it is written here.
    """
    turn, begun, done = threading.Lock(), threading.Event(), threading.Event()

    def attempt() -> None:
        if turn.acquire(blocking=False):
            begun.set()
            with suppress(OSError):
                write()
            done.set()

    with suppress(RuntimeError, MemoryError):  # no more threads
        _thread.start_new_thread(attempt, ())
        begun.wait(THREAD_START_SECONDS)
    attempt()
    done.wait(PATIENCE)


def _tell_launcher(code: int, text: str, rank_info: RankInfo) -> None:
    """Leave the local launcher a report."""
    report = {"time": time.time(), "rank": rank_info.rank, "code": code, "error": text}
    write_whole(error_file(Path(os.environ[MEETING]), rank_info.rank), json.dumps(report))
