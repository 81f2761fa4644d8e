"""The ranks of one of several machines: started, told of signals, and ended together.

srun does this under Slurm. Elsewhere torchrun can, but it makes the exit code 1 of every failure, which hides from
Kubernetes whether a job is to be started again. This program ends with the code of the first rank to fail.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .errors import UserError
from .outcome import DONE, LOST_CONTACT
from .processes import HEARD, prepared

GRACE = 10.0  # seconds between asking the ranks of a failed job to end and killing them
LOOK = 0.05  # seconds between two looks at the ranks
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
Rank = subprocess.Popen[bytes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this machine. Returns the exit code of the first to fail, 0 if all have ended well."""
    args = _parse(arguments)
    ranks: list[Rank] = []
    # Ranks inherit that these signals wait; they let them in as soon as they can save.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    try:
        with _handing_on(ranks):
            for local_rank in range(args.ranks):
                ranks.append(_start(args, local_rank))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            failed = _wait(ranks)
            _end(ranks)
    except OSError as error:
        raise UserError(f"{args.command[0]}: cannot be started: {error.strerror}; install megalite here") from error
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
    parser.add_argument("--nodes", type=_count, required=True, metavar="N", help="number of machines")
    parser.add_argument("--node-rank", type=int, required=True, metavar="I", help="which one this is, from 0")
    parser.add_argument("--ranks", type=_count, required=True, metavar="R", help="ranks on each: one per GPU")
    parser.add_argument("--master", type=_host, required=True, metavar="HOST", help="the machine 0, as all reach it")
    parser.add_argument("--port", type=_port, default=29400, metavar="P", help="free on machine 0 (default: 29400)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="-- megalite train CONFIG… [key=value…]")
    args = parser.parse_args(arguments)
    if not 0 <= args.node_rank < args.nodes:
        raise UserError(f"--node-rank {args.node_rank}: must be at least 0 and below --nodes {args.nodes}")
    return args


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= 100_000:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1 to 100000")
    return number


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be a port, from 1 to 65535")
    return number


def _host(text: str) -> str:
    if not HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: must be the name or address of a machine")
    return text


def _start(args: argparse.Namespace, local_rank: int) -> Rank:
    places = {
        "RANK": args.node_rank * args.ranks + local_rank,
        "WORLD_SIZE": args.nodes * args.ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": args.ranks,
        "MASTER_PORT": args.port,
    }
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

    heard = [number for number in HEARD if signal.getsignal(number) != signal.SIG_IGN]  # nohup has SIGHUP ignored
    handlers = {number: signal.signal(number, hand_on) for number in heard}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(ranks: list[Rank]) -> list[int]:
    """Wait until all ranks have ended well, or one has not. Returns those that have failed by themselves."""
    while True:
        _reap_orphans(ranks)
        codes = [rank.poll() for rank in ranks]
        failed = [local_rank for local_rank, code in enumerate(codes) if code not in (None, DONE)]
        if failed or all(code == DONE for code in codes):
            return failed
        time.sleep(LOOK)


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
