"""One job per run folder: a lock that a killed job does not leave closed, on local and on shared file systems.

The folder `lock` of a run holds a file for every owner, named by its number. The process that creates the file of the
next number owns the run folder: every file system, NFS and Lustre included, lets only one process create a name. The
highest number is never deleted or written again. So a process that acts on an old view of the folder can only create a
number that is too low. An owner that ends well leaves a second file, which says so.

An owner on this machine is alive while its process is. An owner on another machine is alive while its heartbeat goes
on: it renews the time of its file every `BEAT_SECONDS`. A process that waits for the lock looks whether that time
changes, and compares it with no clock. It counts its looks, not the seconds: if it hangs together with the file system,
it has not looked.
"""

import errno
import json
import logging
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megalite.base.errors import InputError, unwritable
from megalite.base.json_shape import TEXT, WHOLE_NUMBER, misfits
from megalite.distributed.health.activity import HIDDEN_PREFIX
from megalite_launch.base.files import foreign, opened

BEAT_SECONDS = 2.0  # seconds between two signs of life
LOOK_SECONDS = 1.0  # seconds between two looks at another's signs of life
MAX_LOOKS = 60  # looks without a sign of life, after which an owner on another machine is taken for dead
SUCCESSOR_LOOKS = 10  # looks that suffice where the owner is an earlier attempt of the same job
FREE_SUFFIX = ".free"
NAME = re.compile(rf"([1-9][0-9]*)({re.escape(FREE_SUFFIX)})?")
MESSAGE_LOOKS = 4  # looks after which people are told what is waited for
MAX_FILE_BYTES = 4096  # read of an owner's file
OWNER = dict.fromkeys(("host", "machine", "job", "attempt", "since"), TEXT) | dict.fromkeys(
    ("pid", "began"), WHOLE_NUMBER
)

log = logging.getLogger("megalite")


@dataclass(frozen=True)
class Owner:
    """A process that may write into a run folder."""

    host: str
    machine: str  # where process ids mean the same
    pid: int
    began: int  # ticks from boot to its start, since process ids are used again
    job: str  # job of Slurm and run of torchrun, by id; "": neither
    attempt: str  # restarts of the job by Slurm and by torchrun, joined by a dot
    since: str  # when it became the owner, for people

    @staticmethod
    def this(environment: Mapping[str, str] = os.environ) -> "Owner":
        slurm, torchrun = environment.get("SLURM_JOB_ID"), environment.get("TORCHELASTIC_RUN_ID")
        names = [f"Slurm job {slurm}"] * bool(slurm)
        names += [f"torchrun {torchrun}"] * (torchrun not in (None, "", "none"))  # none: it was given no id
        job = "".join(character if character.isprintable() else "?" for character in ", ".join(names))
        attempts = [environment.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
        now, pid = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), os.getpid()
        return Owner(socket.gethostname(), _machine(), pid, _began(pid) or 0, job, ".".join(attempts), now)

    @staticmethod
    def parse(text: str) -> "Owner | None":
        """The owner that was written as this JSON; None for anything else, and for text that could steer a terminal."""
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            if not any(misfits(found, OWNER, "")) and all(str(value).isprintable() for value in found.values()):
                return Owner(**found)
        return None

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    @property
    def alive(self) -> bool | None:
        """Flag: its process runs; None if this machine cannot tell."""
        if self.machine != _machine():
            return None
        if not _runs(self.pid):
            return False
        began = _began(self.pid)
        return None if began is None else began == self.began

    def same_job_as(self, other: "Owner") -> bool:
        """Return whether `other` is another attempt of the same job. A job never has two attempts at a time."""
        return self.job == other.job != "" and self.attempt != other.attempt


@dataclass(frozen=True)
class LockLook:
    """The result of one look at the folder `lock`."""

    number: int  # the highest; 0: there was none yet
    free: bool
    owner: Owner | None = None  # None: not told, or free
    beat: int = 0  # the time of its file, on whatever clock


class Lock:
    """The right to write into a run folder, which `take` gives."""

    def __init__(self, folder: Path, number: int, owner: Owner) -> None:
        self.folder, self.path, self.number, self.owner = folder, folder / str(number), number, owner

    @staticmethod
    def take(run: Path, launcher: int | None = None) -> "Lock":
        """Become the owner of the folder `run`, which is made.

        launcher: the process id of this process's launcher, whose lock passes to this process. Waits for a look or two
        if the owner is on another machine, and for up to `MAX_LOOKS` if it may be dead. Raises InputError if the owner
        is alive, or if `run` cannot be written to; Unhealthy if its disk is full.
        """
        folder = run / "lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if told := foreign(folder):
                raise InputError(f"{folder}: {told}")  # files of other folders would be removed
            return _take(folder, Owner.this(), launcher)
        except OSError as error:
            remedy = f"make {run} a folder that can be written to, or set run.dir"
            raise unwritable(folder, "cannot be read and written", error, remedy) from error

    @staticmethod
    def holder(run: Path) -> Owner | None:
        """The process that may be at work in the folder `run`; None if there is none. One look, which changes nothing.

        None too if that cannot be found out, and for an earlier attempt of this process's own job.
        """
        try:
            owner = _look(run / "lock").owner
        except OSError:
            return None
        return None if owner is None or owner.alive is False or owner.same_job_as(Owner.this()) else owner

    def lost(self) -> str:
        """Message on who took the lock, if it was lost, else empty. Raises OSError if that is not known."""
        try:
            seen = _look(self.folder)
        except FileNotFoundError:
            seen = LockLook(0, True)
        if seen.number > self.number:
            return f"{self.folder.parent}: another job has taken over, {seen.owner or 'whose name it has not told yet'}"
        if not self._holds(seen):
            return f"{self.path}: the lock of this run was removed"
        return ""

    def _holds(self, seen: LockLook) -> bool:
        """Return whether the look has found this lock. If `lock` was removed, another job may have the same number."""
        return seen.number == self.number and not seen.free and seen.owner in (None, self.owner)

    @contextmanager
    def beating(self, end: Callable[[str], object]) -> Iterator[None]:
        """Renew the lock meanwhile; `end` is called with a message, from a thread, if it is lost."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                with suppress(OSError):  # a file system that does not answer now may do so later
                    if text := self.lost():
                        end(text)
                        return
                try:
                    os.utime(self.path, follow_symlinks=False)
                except OSError as error:
                    log.warning("%s: no sign of life: %s", self.path, error)

        thread = threading.Thread(target=beat, name=f"{HIDDEN_PREFIX} of the run folder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(BEAT_SECONDS)

    def free(self) -> None:
        """Free the lock, if this process or a dead process it passed it to holds it. Others then get in at once."""
        with suppress(OSError):  # its end, if not its word, will free the folder
            seen = _look(self.folder)
            if self._holds(seen) or (seen.owner is not None and seen.owner.alive is False):
                _mark_free(self.folder, seen.number)


def _take(folder: Path, me: Owner, launcher: int | None) -> Lock:
    before: LockLook | None = None
    looks = still = 0  # looks in all, and those in a row that have seen no change
    while True:
        seen = _look(folder)
        still = still + 1 if seen == before else 0
        owner, alive = seen.owner, seen.owner.alive if seen.owner else None
        same_job = owner is not None and owner.same_job_as(me)
        passed_on = owner is not None and (owner.machine, owner.pid) == (me.machine, launcher)
        silent = alive is None and still >= (SUCCESSOR_LOOKS if same_job else MAX_LOOKS)
        gone = seen.free or alive is False or silent
        if gone or passed_on:
            if _create(folder, seen.number + 1, me):
                return Lock(folder, seen.number + 1, me)
            before = None  # somebody was quicker, or NFS has given an old list of the folder
        elif (alive or (before is not None and not still)) and not (same_job and looks < MAX_LOOKS):
            raise InputError(
                f"{folder.parent}: another job trains in this folder, {owner or 'which has not told its name'}; "
                "stop that one or wait for its end, or give run.name another name"
            )
        else:
            before = seen
        if looks == MESSAGE_LOOKS:
            told = f"megalite: {folder.parent}: {owner or 'another job'} has locked this folder"
            limit = MAX_LOOKS * LOOK_SECONDS
            print(f"{told}; waiting up to {limit:.0f} s to see whether it is alive", file=sys.stderr, flush=True)
        looks += 1
        time.sleep(LOOK_SECONDS)


def _create(folder: Path, number: int, me: Owner) -> bool:
    """Create the file of `number`; return whether `me` has become the owner: no other has this or a higher number."""
    try:
        descriptor = opened(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(me), file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError:
        with suppress(OSError):
            _mark_free(folder, number)
        raise
    names = _names(folder)
    if max(names, default=0) > number:
        return False
    for lower in names.keys() - {number}:
        for name in names[lower]:
            with suppress(OSError):
                (folder / name).unlink()
    return True


def _mark_free(folder: Path, number: int) -> None:
    os.close(opened(folder / f"{number}{FREE_SUFFIX}", os.O_WRONLY | os.O_CREAT))


def _look(folder: Path) -> LockLook:
    while True:
        names = _names(folder)
        number = max(names, default=0)
        if number == 0 or f"{number}{FREE_SUFFIX}" in names[number] or not _is_owners(folder / str(number)):
            return LockLook(number, True)
        try:
            descriptor = os.open(folder / str(number), os.O_RDONLY | os.O_NONBLOCK)  # for which NFS asks the server
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            if _names(folder) != names:  # there is a higher one meanwhile
                continue
            return LockLook(number, False)
        with open(descriptor, "rb") as file:
            beat, text = os.fstat(descriptor).st_mtime_ns, file.read(MAX_FILE_BYTES) or b""
        return LockLook(number, False, Owner.parse(text.decode(errors="replace")), beat)


def _is_owners(path: Path) -> bool:
    """Return whether an owner may have made what is at a path, or has: a link, a pipe or a folder is nobody's."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:  # it may be there for others by now
        return True


def _names(folder: Path) -> dict[int, set[str]]:
    """Names of the files in the lock's folder, by number."""
    names: dict[int, set[str]] = {}
    for name in os.listdir(folder):
        if found := NAME.fullmatch(name):
            names.setdefault(int(found[1]), set()).add(name)
    return names


def _machine() -> str:
    """An id that differs between boots of a kernel and, on Linux, between containers on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _runs(pid: int) -> bool:
    """Return whether a process has this number, which may be that of another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    return True


def _began(pid: int) -> int | None:
    """Start time of a process, in ticks since boot; -1 once it has ended and waits to be noticed; None: unknown."""
    try:
        # The name of the process comes before the last parenthesis, in bytes that need be no text.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
