"""Runs a program that may hang, crash, print without end or take all memory, and says how it ended. Imports no torch.

All that the program starts inherits a mark in its environment, by which it is found and ended, whatever sessions and
groups it has made; only what clears its environment escapes. Output is read as it comes; its beginning and its end are
kept.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import read_object, write_object

TAIL_BYTES = 16_384  # bytes of output that are kept of its end
MAX_LOG_BYTES = 4 << 20  # bytes of output that are kept of its beginning, while it runs
GRACE = 8.0  # seconds from SIGINT, on which pytest writes its report, to SIGKILL
PAUSE = 0.2  # seconds between two looks at clock and memory
CHUNK_BYTES = 1 << 16
LEASH = str(Path(__file__).with_name("leash.py"))
MARK = "MEGALITE_BENCH_CASE"  # environment of all processes of a case
ROUNDS = 20


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program: seconds that it may take, and bytes that its processes may hold together in host memory."""

    seconds: float
    memory: float = float("inf")


@dataclass(frozen=True)
class ProgramEnd:
    """End of a program.

    code: its exit code, or the negative number of the signal that killed it. broken: the limit that it broke, `time` or
    `memory`, or "". tail: the end of its output. peak: bytes of host memory at most, as far as was seen.
    """

    code: int
    broken: str
    seconds: float
    tail: str
    peak: int


def run_limited(
    command: Sequence[str], environment: Mapping[str, str], limits: ProgramLimits, leader: Path, log: Path
) -> ProgramEnd:
    """Run `command` until it ends or breaks a limit. Nothing of it is alive afterwards, whatever happens here.

    leader: a file that names the running process, for `end_leftover` in case this process is killed. log: a file for
    the beginning of its output, while it runs. Raises OSError if no process can be started.
    """
    began, mark = time.monotonic(), uuid.uuid4().hex
    write_object(leader, {"mark": mark})
    output = _Output(log)
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", LEASH, str(os.getpid()), *command],
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            broken, peak = _watch(process, limits, began, output, mark)
        finally:
            _end(mark)
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs may keep a process where no signal ends it
                process.wait(GRACE)
            if process.stdout is not None:
                process.stdout.close()
    finally:
        tail = output.close()
        leader.unlink(missing_ok=True)
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return ProgramEnd(code, broken, time.monotonic() - began, tail, peak)


def end_leftover(leader: Path) -> bool:
    """Kill what a parent that was killed itself has left running. Returns whether there was anything."""
    try:
        mark = read_object(leader, CHUNK_BYTES).get("mark")
    except InputError:
        return False
    return isinstance(mark, str) and len(mark) == len(uuid.uuid4().hex) and _end(mark)


class _Output:
    """Keeps the end of a program's output, and in a file its beginning."""

    def __init__(self, log: Path) -> None:
        self._tail, self._room = bytearray(), 0
        self._log: int | None = None
        with suppress(OSError):  # a link in its place, say, costs the log, not the case
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            self._room = MAX_LOG_BYTES

    def add(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if self._log is not None and self._room:
            with suppress(OSError):  # a full disk, as above
                self._room -= os.write(self._log, chunk[: self._room])

    def close(self) -> str:
        if self._log is not None:
            os.close(self._log)
        return self._tail.decode(errors="replace")


def _watch(
    process: subprocess.Popen[bytes], limits: ProgramLimits, began: float, output: _Output, mark: str
) -> tuple[str, int]:
    """Read output until the program ends. Returns the limit that it broke, and its peak of memory."""
    pipe = process.stdout
    assert pipe is not None
    peak, broken, kill_at, looked = 0, "", float("inf"), 0.0
    os.set_blocking(pipe.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while process.poll() is None:
            if selector.get_map() and selector.select(PAUSE):
                chunk = pipe.read(CHUNK_BYTES)
                output.add(chunk or b"")
                if chunk == b"":
                    selector.unregister(pipe)
            elif not selector.get_map():  # it has closed its output, and lives on
                time.sleep(PAUSE)
            now = time.monotonic()
            if now - looked < PAUSE:
                continue
            looked, held = now, _memory(mark)
            peak = max(peak, held)
            if now >= kill_at or held > limits.memory:
                broken, kill_at = broken or "memory", min(kill_at, now)
                _end(mark)
                if now >= kill_at + GRACE:
                    return broken, peak  # no signal ends it: it is left behind
            elif not broken and now - began > limits.seconds:
                broken, kill_at = "time", now + GRACE
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGINT)
    for _ in range(TAIL_BYTES // 64):  # drain the pipe, which a process that is left may fill without end
        if not (chunk := pipe.read(CHUNK_BYTES)):
            break
        output.add(chunk)
    return broken, peak


def _end(mark: str) -> bool:
    """Kill all processes with a mark. Returns whether there was one."""
    ended = False
    for _ in range(ROUNDS):  # one that is forked meanwhile is met in the next round
        members = _members(mark)
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            break
        ended = True
        time.sleep(PAUSE / 4)
    return ended


def _members(mark: str) -> list[int]:
    """The processes that have a mark; those that only wait to be reaped have no environment any more."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _memory(mark: str) -> int:
    """Bytes of host memory that processes with a mark hold; pages that they share count for each."""
    total = 0
    for pid in _members(mark):
        with suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
