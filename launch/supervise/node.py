"""The ranks of one of several machines: started, told of signals, and ended together.

srun does this under Slurm. Elsewhere torchrun can, but it makes the exit code 1 of every failure, which hides from
Kubernetes whether a job is to be started again. This program ends with the code of the first rank to fail, or
with one that says that starting the job again is of no use.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.arguments import count, natural, port
from ..base.errors import UserError
from ..base.free_space import FULL_DISK_ERRORS
from ..base.outcome import BAD_INPUT, DONE, FAILED, LOST_CONTACT, UNHEALTHY
from ..base.processes import HANDLED_SIGNALS, prepared
from ..base.run_folder import ATTEMPT, RunFolder
from .attempts_without_supervisor import Journal

GRACE = 10.0  # seconds between asking the ranks of a failed job to end and killing them
POLL_SECONDS = 0.05  # seconds between two looks at the ranks
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
JOB = re.compile(r"[A-Za-z0-9_-]{1,100}")
Rank = subprocess.Popen[bytes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this machine. Returns the exit code of the first to fail, 0 if all have ended well.

    With a run folder, attempts are written down there, and the exit code tells whether to try again (`journal`).
    """
    args = _parse(arguments)
    if args.run is None:
        return _run(args)
    name = args.job or f"node-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    run = RunFolder(args.run.absolute())
    run.check()
    journal = Journal(run, name, args.node_rank, args.nodes, args.ranks)
    code = journal.over()
    if code is None and args.node_rank == 0:
        try:
            code = journal.begin()
        except OSError as error:  # it may go away: no reason to end the job, but for a full disk
            print(f"megalite-node: {error.filename}: {error.strerror}", file=sys.stderr)
            return UNHEALTHY if error.errno in FULL_DISK_ERRORS else FAILED
    if code is not None:
        print(f"megalite-node: the job {name} has ended with exit code {code}", file=sys.stderr)
        return code
    if args.node_rank != 0:
        return journal.note_end(_run(args))
    try:
        return journal.finish(_run(args, journal.attempt, journal.show))
    finally:
        journal.show(at_once=True)


def _run(args: argparse.Namespace, attempt: Path | None = None, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Run the ranks. Returns the exit code of the first to fail, BAD_INPUT if they cannot be started.

    attempt: the folder in which they say how they end; other machines' ranks learn it from rank 0. meanwhile: called
    again and again.
    """
    ranks: list[Rank] = []
    # Ranks inherit that these signals wait; they let them in as soon as they can save.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        with _handing_on(ranks):
            for local_rank in range(args.ranks):
                ranks.append(_start(args, local_rank, attempt))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            failed = _wait(ranks, meanwhile)
            _end(ranks)
    except OSError as error:
        print(f"megalite-node: error: {args.command[0]}: cannot be started: {error.strerror}; install megalite here",
              file=sys.stderr)  # fmt: skip
        return BAD_INPUT
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _code([ranks[local_rank].returncode for local_rank in failed])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "megalite-node",
        description="Start the ranks of one of several machines. Run it on each of them with the same options, "
        "but for --node-rank. Signals are handed on to the ranks.",
    )
    parser.add_argument("--nodes", type=count, required=True, metavar="N", help="number of machines")
    parser.add_argument("--node-rank", type=natural, required=True, metavar="I", help="which one this is, from 0")
    parser.add_argument("--ranks", type=count, required=True, metavar="R", help="ranks on each: one per GPU")
    parser.add_argument("--master", type=_host, required=True, metavar="HOST", help="the machine 0, as all reach it")
    parser.add_argument("--port", type=port, default=29400, metavar="P", help="free on machine 0 (default: 29400)")
    parser.add_argument("--run", type=Path, metavar="RUN", help="the run folder: attempts are written down there")
    parser.add_argument("--job", type=_job, metavar="ID", help="with --run: of the job, the same on all machines")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="-- megalite train CONFIG… [key=value…]")
    args = parser.parse_args(arguments)
    if not 0 <= args.node_rank < args.nodes:
        raise UserError(f"--node-rank {args.node_rank}: must be at least 0 and below --nodes {args.nodes}")
    return args


def _job(text: str) -> str:
    if not JOB.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text:.60}: must have letters, digits, dashes and underscores alone")
    return text


def _host(text: str) -> str:
    if not HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: must be the name or address of a machine")
    return text


def _start(args: argparse.Namespace, local_rank: int, attempt: Path | None) -> Rank:
    places: dict[str, object] = {
        "RANK": args.node_rank * args.ranks + local_rank,
        "WORLD_SIZE": args.nodes * args.ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": args.ranks,
        "MASTER_PORT": args.port,
    }
    if attempt is not None:
        places[ATTEMPT] = attempt
    environment = {**os.environ, "MASTER_ADDR": args.master, **{name: str(value) for name, value in places.items()}}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.ranks)))
    return subprocess.Popen(
        args.command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches all of the terminal's processes: ranks would hear of it twice
        preexec_fn=prepared(signal.SIGKILL),
    )


@contextmanager
def _handing_on(ranks: list[Rank]) -> Iterator[None]:
    def hand_on(number: int, _: object) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(number)

    # nohup has SIGHUP ignored
    heard = [number for number in HANDLED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, hand_on) for number in heard}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(ranks: list[Rank], meanwhile: Callable[[], None]) -> list[int]:
    """Wait until all ranks have ended well, or one has not. Returns those that have failed by themselves."""
    while True:
        _reap_orphans(ranks)
        codes = [rank.poll() for rank in ranks]
        failed = [local_rank for local_rank, code in enumerate(codes) if code not in (None, DONE)]
        if failed or all(code == DONE for code in codes):
            return failed
        meanwhile()
        time.sleep(POLL_SECONDS)


def _reap_orphans(ranks: list[Rank]) -> None:
    """The first process of a container gets the orphans of all others, and must notice their ends."""
    if os.getpid() != 1:
        return
    ours = {rank.pid for rank in ranks}
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)


def _end(ranks: list[Rank]) -> None:
    """Ask the ranks that are left to end, and give them some time."""
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))


def _code(failed: Sequence[int]) -> int:
    """The exit code of this machine; a rank that has only lost contact follows others.

    failed: codes of ranks that have failed by themselves, negative for a signal.
    """
    codes = [128 - code if code < 0 else code for code in failed]
    return next((code for code in codes if code != LOST_CONTACT), LOST_CONTACT) if codes else DONE
