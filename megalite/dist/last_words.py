"""What a failing rank leaves behind: one message for the user, from the rank that knows the cause. Imports no torch."""

import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from megalite.dist.local import MEETING, error_file
from megalite.dist.ranks import RankInfo
from megalite.output import Outlet

OUTCOME = "MEGALITE_OUTCOME"  # environment: a file for the exit code of the first rank to fail

log = logging.getLogger("megalite")
log.addHandler(logging.NullHandler())  # until the rank's log file is open, nothing is logged


def tell(code: int, text: str, rank_info: RankInfo) -> None:
    """Report an error: to the launcher, if it shows the first error of the job, or else to the user.

    An empty `text` means that `code` is a verdict that needs no explanation.
    """
    note_outcome(code)
    with Outlet("last words"):  # which must not change the exit code
        if MEETING in os.environ:
            try:
                _tell_launcher(code, text, rank_info)
            except OSError:  # a full disk
                print(f"megalite: rank {rank_info.rank}: {text}", file=sys.stderr, flush=True)
                raise
        elif text and (torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            report = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
            Path(torchrun).write_text(json.dumps({"message": report}))
        elif text:
            print(f"megalite: rank {rank_info.rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def note_outcome(code: int) -> None:
    """Write down the exit code of the first rank to fail: Slurm gives the highest of all ranks, torchrun always 1."""
    with suppress(OSError):  # another rank was first, or there is no such folder
        if outcome := os.environ.get(OUTCOME):
            with Path(outcome).open("x") as file:
                file.write(f"{code}\n")


def _tell_launcher(code: int, text: str, rank_info: RankInfo) -> None:
    """Leave the local launcher a report."""
    report = {"time": time.time(), "rank": rank_info.rank, "code": code, "error": text}
    path = error_file(Path(os.environ[MEETING]), rank_info.rank)
    partial = path.with_suffix(".partial")  # the launcher may stop this process at any moment
    partial.write_text(json.dumps(report))
    partial.rename(path)
