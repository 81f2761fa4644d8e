"""Runs benchmarks on local ranks: a benchmark runs itself once more for every rank, and its imports are shared."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import listen, restore, stop
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import RankInfo, find_rank_info
from megalite.distributed.start.signals import end_when_stopped
from megalite.distributed.start.start import run_rank, start
from megalite_tools.report_file import header

CPU = torch.device("cpu")
TIMEOUT = 600.0  # seconds


def run_on_ranks(
    module: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    ranks: Callable[[argparse.Namespace], int],
    measure: Callable[[RankInfo, argparse.Namespace, dict[str, Any]], None],
    judge: Callable[[argparse.Namespace], int] = lambda _: ExitCode.DONE,
    around: Callable[[argparse.Namespace], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> int:
    """Run a benchmark. Returns the exit code of its ranks if that is not 0, else the one of `judge`.

    module: the module that is run on every rank, each a fork of this process, which must have computed nothing. ranks:
    the number of ranks for given options; raises InputError for bad options. around: a context of the process that
    starts the ranks, open while they run. It is left properly when a stop signal ends them, so it can delete folders.
    measure: runs on every rank, in a process group, with one thread; its last argument is the header of a report.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def as_rank(rank_info: RankInfo, options: argparse.Namespace) -> int:
        start(rank_info, "cpu", TIMEOUT)
        torch.set_num_threads(1)
        measure(rank_info, options, header(shlex.join([parser.prog, *arguments])))
        return ExitCode.DONE

    def run() -> int:
        options, rank_info = parser.parse_args(arguments), find_rank_info()
        if rank_info is not None:
            end_when_stopped(rank_info)
            return run_rank(lambda: as_rank(rank_info, options), rank_info)
        count = ranks(options)
        before = listen(stop)
        try:
            with around(options):
                code = launch(module, arguments, count, None, module)
        finally:
            restore(before)
        return code or judge(options)

    return exit_code(parser.prog, run)
