"""The ranks of a job meet over a key-value store, where they make sure that they all belong to the same job."""

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megalite import __version__
from megalite.base.errors import InputError
from megalite.base.output import warn
from megalite.distributed.start.failure_report import note_meeting
from megalite.distributed.start.local import MEETING
from megalite.distributed.start.ranks import RankInfo
from megalite_launch.base.run_folder import ATTEMPT

QUIET_SECONDS = 30.0  # seconds of waiting before people are told what for
CONNECT_TIMEOUT = 60.0  # seconds that PyTorch may take to connect to a port on which somebody listens
LISTED_DIFFERENCES = 3  # differences between ranks


class LostPeer(RuntimeError):
    """Some ranks do not come or do not answer: shown as one message, exit code LOST_CONTACT."""


@dataclass(frozen=True)
class Meeting:
    """The store over which the ranks of one attempt have met, and what they have learned of each other."""

    store: dist.Store
    hosts: dist.Store  # rank -> the name of its host
    host: str  # this one
    keeper: str  # who keeps the store, and where
    deputy: int  # the rank to tell of the loss of the store


def meet(rank_info: RankInfo, timeout: float, facts: Mapping[str, Any] | None = None) -> Meeting:
    """Wait until all ranks are there.

    timeout: in seconds. facts: further values that must be the same on all ranks, beside versions and the launcher's
    name of the job. Raises LostPeer if some do not come, InputError if the address of rank 0 is missing or wrong.
    Raises InputError too on a rank that does not belong to rank 0's job: one of a second job with the same port, or on
    a node with other files.
    """
    waiting = _Waiting(rank_info, timeout)
    store, keeper = _open_store(rank_info, waiting)
    hosts, host = dist.PrefixStore("host", store), socket.gethostname()
    mine = {
        "host": host,
        "ranks": rank_info.world_size,
        "job": _job(),
        "megalite": __version__,
        "torch": torch.__version__,
    }
    mine |= facts or {}

    def absent() -> str:
        ranks = [str(rank) for rank in range(rank_info.world_size) if not hosts.check([str(rank)])] if first else []
        who = f"rank {', '.join(ranks)}" if ranks else "some ranks"
        return f"{who} did not come"

    def read(key: str) -> str:
        waiting.until(lambda: store.check([key]), absent, tells=first)
        return store.get(key).decode()

    try:
        hosts.set(str(rank_info.rank), host)
        first = store.add("here", 1) == 1  # one rank looks for the absent, lest all ask for all
        if rank_info.rank == 0:
            store.set("attempt", os.environ.get(ATTEMPT, ""))
            store.set("job", json.dumps(mine))
        _refuse_another_job(rank_info.rank, json.loads(json.dumps(mine)), json.loads(read("job")), keeper)
        if store.add("arrived", 1) == rank_info.world_size:
            store.set("complete", str(_deputy(hosts, rank_info.world_size)))
        deputy = int(read("complete"))
        note_meeting(rank_info)
        if attempt := store.get("attempt").decode():  # only the launcher of rank 0 may know it
            os.environ.setdefault(ATTEMPT, attempt)
        if rank_info.local_rank == 0 and hosts.get("0") != hosts.get(str(deputy)):
            _warn_of_hidden_host(host)
        return Meeting(store, hosts, host, keeper, deputy)
    except dist.DistError as error:
        raise LostPeer(f"the job's key-value store, kept by {keeper}, is lost: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The message of an error of PyTorch, without the source location before it and the C++ stack behind it."""
    line = str(error).strip().partition("\n")[0].partition(". ")[0]
    return line[line.find("] ") + 2 :] if line.startswith("[") and "] " in line else line or type(error).__name__


class _Waiting:
    """Waits for other ranks, and tells the user, one time only, if that takes long."""

    def __init__(self, rank_info: RankInfo, timeout: float) -> None:
        self.rank_info, self.timeout = rank_info, timeout
        began = time.monotonic()
        self.quiet_until, self.deadline = began + QUIET_SECONDS, began + timeout

    def until(self, done: Callable[[], bool], missing: Callable[[], str], tells: bool) -> None:
        """Wait until `done()`. Raises LostPeer with the text `missing()` when the time is up.

        tells: whether this rank is the one to say what is waited for.
        """
        pause = 0.01
        while not done():
            now = time.monotonic()
            if now > self.deadline:
                raise LostPeer(f"{missing()} within {self.timeout:g} s (train.timeout)")
            if now > self.quiet_until:
                self.quiet_until = self.deadline
                if tells:
                    self._tell(missing())
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    def _tell(self, missing: str) -> None:
        patience = f"gives up after {self.timeout:g} s (train.timeout)"
        warn(f"rank {self.rank_info.rank} waits: {missing} within {QUIET_SECONDS:g} s; it {patience}")


def kept(store: dist.Store) -> dist.Store:
    """Return `store`. One in a file is never destroyed: that writes once more, and aborts where the disk is full."""
    if MEETING in os.environ:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def _open_store(rank_info: RankInfo, waiting: _Waiting) -> tuple[dist.Store, str]:
    """The key-value store over which the ranks find each other, and who keeps it."""
    folder = os.environ.get(MEETING)
    if folder or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if folder:
        return kept(dist.FileStore(f"{folder}/store", rank_info.world_size)), "the launcher"
    host, port = _address()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps one for all of its attempts
    keeper = f"{'an agent of torchrun' if agent else 'rank 0'} at {host}:{port}"
    keeps = rank_info.rank == 0 and not agent
    if keeps:
        _look_up(host, port)
    else:
        _reach(host, port, keeper, waiting)
    try:
        patience = timedelta(seconds=min(waiting.timeout, CONNECT_TIMEOUT))
        store = dist.TCPStore(host, port, rank_info.world_size, keeps, patience, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if keeps and "listen" in str(error):
            raise InputError(
                f"MASTER_PORT = {port}: rank 0 cannot listen there, choose another; {reason(error)}"
            ) from None
        if keeps:
            rule = f"rank 0, on {socket.gethostname()}, cannot be reached there; {reason(error)}"
            raise InputError(f"MASTER_ADDR = {host}: must be the host of rank 0: {rule}") from None
        raise LostPeer(f"{keeper} does not answer: {reason(error)}") from None
    store.set_timeout(timedelta(seconds=waiting.timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store), keeper


def _address() -> tuple[str, int]:
    """Host and port of rank 0."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InputError(f"{' and '.join(missing)} must name the node and port of rank 0; see launch/slurm.sbatch")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise InputError(f"MASTER_PORT = {port}: must be a port number, 1 to 65535")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InputError(f"MASTER_ADDR = {host}: must be the name or address of a host: {error}") from None
    return host, int(port)


def _look_up(host: str, port: int) -> None:
    """Raises InputError for a host that rank 0 does not know: PyTorch would say so with a stack of C++."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        told = f"{error.strerror or error}; name the host of rank 0 as this one, {socket.gethostname()}, knows it"
        raise InputError(f"MASTER_ADDR = {host}: {told}") from None


def _reach(host: str, port: int, keeper: str, waiting: _Waiting) -> None:
    """Wait until somebody listens there. PyTorch would not say what it waits for, but fill the terminal with stacks."""
    problem = ""

    def reached() -> bool:
        nonlocal problem
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            problem = error.strerror or str(error)
            return False
        return True

    somebody_of_each_node = waiting.rank_info.local_rank < 2
    waiting.until(reached, lambda: f"{keeper} did not answer ({problem})", somebody_of_each_node)


def _warn_of_hidden_host(host: str) -> None:
    """Warn if gloo, which goes by the address of this host's name, will offer an address that others cannot use."""
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        address = error.strerror or str(error)
    else:
        if not address.startswith("127.") and address != "::1":
            return
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        remedy = "set GLOO_SOCKET_IFNAME to the network interface, such as eth0"
        warn(f"other hosts cannot reach this one by its name {host} ({address}): {remedy}")


def _job(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher's name of the job, the same for all of its ranks."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return f"torchrun {environment['TORCHELASTIC_RUN_ID']}"
    if "RANK" in environment:
        return ""
    return f"Slurm {environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"


def _refuse_another_job(rank: int, mine: Mapping[str, Any], theirs: Mapping[str, Any], keeper: str) -> None:
    differ = [name for name in {**theirs, **mine} if name != "host" and mine.get(name) != theirs.get(name)]
    if differ:
        shown = [
            f"{name} = {mine.get(name)!r} here, {theirs.get(name)!r} there" for name in differ[:LISTED_DIFFERENCES]
        ]
        more = f"; and {len(differ) - LISTED_DIFFERENCES} more" if len(differ) > LISTED_DIFFERENCES else ""
        raise InputError(
            f"rank {rank} on {mine['host']} is not of the job of rank 0 on {theirs['host']}, met by {keeper}: "
            f"{'; '.join(shown)}{more}; give all nodes the same files and versions, and each job its own MASTER_PORT"
        )


def _deputy(hosts: dist.Store, size: int) -> int:
    """The first rank that is not lost with the host of rank 0."""
    names = hosts.multi_get([str(rank) for rank in range(size)])
    return next((rank for rank, name in enumerate(names) if name != names[0]), min(1, size - 1))
