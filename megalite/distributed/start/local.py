"""The local launcher: starts as many processes on this machine as the layout has ranks. Imports no torch by itself."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.late_import import import_for_good
from megalite.base.output import Outlet
from megalite.base.stop_signals import blocked, held_up, listen, restore
from megalite.distributed.start.forked import Forked
from megalite.distributed.start.host import check_ranks
from megalite_launch.base.files import appended
from megalite_launch.base.outcome import Failure, write_failure
from megalite_launch.base.run_folder import ATTEMPT, log_name, node_name
from megalite_launch.base.texts import escaped

MEETING = "MEGALITE_MEETING"  # environment: the folder through which local ranks meet and the launcher hears of errors
LAUNCHER = "MEGALITE_LAUNCHER"  # environment: the launcher's process id
THREADS = "OMP_NUM_THREADS"  # environment: how many threads OpenMP, and so PyTorch on CPUs, may use
GRACE = 3.0  # seconds between asking the ranks to end and killing them
Process = subprocess.Popen[bytes] | Forked


def error_file(meeting: Path, rank: int) -> Path:
    """The file into which a failing rank writes its last words."""
    return meeting / f"rank_{rank:04d}.error"


def log_file(logs: Path, rank: int) -> Path:
    """The file into which a rank without a terminal writes."""
    return logs / (log_name(node_name(), rank) if ATTEMPT in os.environ else f"rank_{rank:04d}.log")


def launch(
    module: str,
    arguments: Sequence[str],
    world_size: int,
    logs: Path | None = None,
    shared: str | None = None,
    importing: AbstractContextManager[None] | None = None,
) -> int:
    """Run `python -m module arguments` as `world_size` ranks. Returns the exit code of the job.

    Rank 0 keeps the terminal. The others write into the folder `logs`, or if that is None into a temporary one. The
    first rank to fail ends the job: the others are stopped, and its error is the one shown. A rank that dies of a
    signal gives exit code LOST_CONTACT. The signals of `STOP` are handed on to the ranks, however long these take to
    obey; ranks start with them blocked. Raises KeyboardInterrupt at the second SIGINT, once all ranks have ended, and
    InputError if this machine cannot have so many ranks.

    shared: a module that every rank imports. On Linux it is imported once, here, and the ranks are forks of this
    process. Give it only for ranks on CPUs, and only in a process that has computed nothing: neither an initialized
    CUDA driver nor threads survive a fork. importing: a context that is entered while that module is imported, which
    takes a minute on some file systems; it must leave no thread behind.
    """
    check_ranks(world_size)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited; exit codes would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start = _spawn
    if shared is not None and sys.platform == "linux":
        with importing or nullcontext():
            import_for_good(shared)
        start = _fork
    with ExitStack() as stack:
        ranks: list[Process] = []
        try:
            with blocked():  # ranks unblock them once they have handlers
                stack.enter_context(_handing_on(ranks))
                with held_up():  # until all ranks are there to be told
                    meeting = Path(stack.enter_context(_temporary_folder()))
                    for rank in range(world_size):
                        environment = _environment(rank, world_size, meeting)
                        log = None if rank == 0 else log_file(logs or meeting, rank)
                        try:
                            ranks.append(start(module, arguments, environment, log))
                        except OSError as error:
                            _kill(ranks)
                            ranks.clear()  # their open files are needed to clean up
                            raise _no_more(rank, world_size, error) from error
            failed = _wait(ranks)
            _stop(ranks)
        finally:
            _kill(ranks)
        return _explain(ranks, failed, meeting, logs) if failed else 0


def _no_more(started: int, world_size: int, error: OSError) -> InputError:
    """Make the error for a limit of the system, such as of processes or of open files."""
    return InputError(
        f"only {started} of {world_size} ranks could be started: {error.strerror}; use smaller degrees in parallel.*, "
        "or raise the limits of processes (ulimit -u) and open files (ulimit -n)"
    )


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="megalite-")
    except OSError as error:
        raise InputError(
            f"no temporary folder can be made: {error.strerror}; set TMPDIR to a folder that can be written to"
        ) from error


def _environment(rank: int, world_size: int, meeting: Path) -> dict[str, str]:
    """The environment variables that a rank has beside the launcher's."""
    found = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    found |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    found |= {MEETING: str(meeting), LAUNCHER: str(os.getpid())}
    if THREADS not in os.environ:
        found[THREADS] = str(max(1, (os.cpu_count() or 1) // world_size))
    return found


def _spawn(module: str, arguments: Sequence[str], environment: dict[str, str], log: Path | None) -> Process:
    output = None if log is None else _opened(log)
    try:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches all of the terminal's processes: ranks would hear of it twice
        )
    finally:
        if output is not None:
            output.close()


def _fork(module: str, arguments: Sequence[str], environment: dict[str, str], log: Path | None) -> Process:
    def main() -> None:
        """Run `module` in this fork as a process of `_spawn` would."""
        os.setsid()
        for number in listen(signal.SIG_DFL):
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        if log is not None:
            with _opened(log) as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
        os.environ.update(environment)
        if torch := sys.modules.get("torch"):
            # OpenMP has read its environment already. A pool of threads that the fork has lost is made anew here, as
            # PyTorch 2.14 aborts where two threads of autograd do that at once.
            torch.set_num_threads(int(environment.get(THREADS, torch.get_num_threads())))
        sys.modules.pop(module, None)  # the launcher may run it too
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return Forked(main)


def _opened(log: Path) -> IO[bytes]:
    """The log of a rank, or nothing where that cannot be opened."""
    with Outlet(str(log)):
        return appended(log)
    return open(os.devnull, "ab")


@contextmanager
def _handing_on(ranks: list[Process]) -> Iterator[None]:
    """Hand signals on to the ranks; the second SIGINT raises KeyboardInterrupt here."""
    interrupts = 0

    def handler(number: int, frame: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if number == signal.SIGINT and interrupts == 2:
            raise KeyboardInterrupt
        for process in ranks:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    previous = listen(handler)
    try:
        yield
    finally:
        restore(previous)


def _wait(ranks: list[Process]) -> list[int]:
    """Wait until all ranks have ended well, or one has not. Returns the ranks that have failed by themselves."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, ExitCode.DONE)]
        if failed or all(code == ExitCode.DONE for code in codes):
            return failed
        time.sleep(0.05)


def _stop(ranks: list[Process]) -> None:
    """Ask the ranks that are left to end, and give them some time."""
    deadline = time.monotonic() + GRACE
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _kill(ranks: list[Process]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):  # an interrupt has lost the exit code
            process.wait()


def _explain(ranks: list[Process], failed: list[int], meeting: Path, logs: Path | None) -> int:
    """Print why the job ended, and return its exit code.

    If a signal has killed a rank, that is the cause: the rank could write nothing, and its peers complain of its
    absence. Otherwise the earliest error is the cause; one that only misses a peer comes last. A rank that `_stop` has
    stopped is no cause.
    """
    codes = [process.wait() for process in ranks]
    killed = [rank for rank in failed if codes[rank] < 0]
    reports = [json.loads(path.read_text()) for path in sorted(meeting.glob("rank_*.error"))]
    reports = [report for report in reports if report["code"] != ExitCode.STOPPED or report["rank"] in failed]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        told = f"killed by {name}{'; the machine may be out of memory' if name == 'SIGKILL' else ''}"
        _note_killed(killed[0], 128 - codes[killed[0]], told)
        print(f"megalite: rank {killed[0]} was {told}{_see(logs, killed[0])}", file=sys.stderr)
        return ExitCode.LOST_CONTACT
    if reports:
        first = min(reports, key=lambda report: (report["code"] == ExitCode.LOST_CONTACT, report["time"]))
        if first["error"]:
            print(f"megalite: rank {first['rank']}: {escaped(first['error'])}", file=sys.stderr)
        return int(first["code"])
    print(f"megalite: rank {failed[0]} failed{_see(logs, failed[0])}", file=sys.stderr)
    return codes[failed[0]]


def _note_killed(rank: int, code: int, text: str) -> None:
    """Write the report that a killed rank could not."""
    if attempt := os.environ.get(ATTEMPT):
        with suppress(OSError):
            write_failure(Path(attempt), Failure(time.time(), rank, node_name(), code, 0, text))


def _see(logs: Path | None, rank: int) -> str:
    return "" if logs is None else f"; see {log_file(logs, rank)}"
