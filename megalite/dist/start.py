"""Start-up and end of a rank: meeting the others, device, process group, and what a failure is called."""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megalite.config.errors import InputError, Unhealthy
from megalite.dist.last_words import log, tell
from megalite.dist.local import MEETING
from megalite.dist.ranks import Place, let_others_speak
from megalite.dist.signals import die_with_launcher, hear
from megalite.output import Lost

LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "timed out",
    "connection refused",
    "broken pipe",
    "remote process exited",
)


class LostPeer(RuntimeError):
    """Ranks do not come or do not answer: shown as one message, exit code 5."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective tells that another rank is gone."""
    signs = any(sign in str(error).lower() for sign in LOST_PEER)
    return isinstance(error, LostPeer) or (isinstance(error, RuntimeError) and signs)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one attempt have met."""

    store: dist.Store
    hosts: dist.Store  # rank -> the name of its host
    host: str  # this one
    keeper: str  # who is lost when the store is


def meet(place: Place, timeout: float) -> Meeting:
    """Wait until all ranks are there.

    timeout: in seconds. Raises LostPeer if some do not come, InputError if the address of rank 0 is missing.
    """
    store, keeper = _open_store(place, timeout)
    hosts, host = dist.PrefixStore("host", store), socket.gethostname()
    hosts.set(str(place.rank), host)
    nth = store.add("arrived", 1)
    if nth == place.world_size:
        store.set("complete", "yes")
    deadline, pause = time.monotonic() + timeout, 0.01
    while not store.check(["complete"]):
        if time.monotonic() > deadline:
            absent = range(place.world_size) if nth == 1 else ()  # one rank looks for them
            raise LostPeer(_absent([rank for rank in absent if not hosts.check([str(rank)])], timeout))
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
    return Meeting(store, hosts, host, keeper)


def _absent(ranks: list[int], timeout: float) -> str:
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "some ranks"
    return f"{who} did not come within {timeout:g} s (train.timeout)"


def start(
    place: Place, device: Literal["auto", "cpu", "cuda"], timeout: float, meeting: Meeting | None = None
) -> torch.device:
    """Join the job: pick this rank's device and open the default process group.

    timeout: seconds that a rank waits for its peers in one collective. meeting: None, if the ranks have not met yet.
    Raises InputError when the device or the address of rank 0 is missing.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda":
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            raise InputError(
                f"run.device={device}: this node runs at least {place.local_rank + 1} ranks but has {count} GPUs; "
                "start one rank per GPU, or set run.device=cpu"
            )
        torch.cuda.set_device(place.local_rank)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = (meeting or meet(place, timeout)).store
        wait = timedelta(seconds=timeout)
        dist.init_process_group(backend, None, wait, place.world_size, place.rank, store)
    return torch.device(kind, place.local_rank) if kind == "cuda" else torch.device("cpu")


def start_alone() -> None:
    """A process group of this process alone, for tools that read a model; no launcher, no network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _open_store(place: Place, timeout: float) -> tuple[dist.Store, str]:
    """The key-value store over which the ranks find each other, and who keeps it."""
    folder = os.environ.get(MEETING)
    if folder or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if folder:
        return dist.FileStore(f"{folder}/store", place.world_size), "the launcher"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"{' and '.join(missing)} must name the node and port of rank 0; see launch/slurm.sbatch")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps one for all of its attempts
    keeper, keeps = ("torchrun's agent" if agent else "rank 0"), place.rank == 0 and not agent
    try:
        wait = timedelta(seconds=timeout)
        store = dist.TCPStore(host, int(port), place.world_size, keeps, wait, wait_for_workers=False)
    except ValueError:
        raise InputError(f"MASTER_PORT = {port}: must be a port number") from None
    except dist.DistNetworkError as error:
        if keeps:
            raise InputError(f"MASTER_PORT = {port}: rank 0 cannot listen there, choose another; {error}") from None
        raise LostPeer(f"{keeper} does not answer at {host}:{port}: {error}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store), f"{keeper} at {host}:{port}"


def run_rank(main: Callable[[], int], place: Place) -> int:
    """Run `main` as one rank and return its exit code; if it fails, report and end the process at once.

    What `main` returns is the verdict of the whole job, the same on every rank. A failing rank must not wait for
    its peers in some destructor: they notice its death, and fail too.
    """
    die_with_launcher()
    try:
        hear()
        code = main()
        if dist.is_initialized():
            dist.barrier()  # the first rank to end with another code than 0 ends the job: let all say their last words
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure is reported, then ends the process
        code, text = _explain(error)
        _report(code, text, place)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code != 0:
        tell(code, "", place)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the message that an error calls for."""
    if isinstance(error, InputError):
        return 2, f"error: {error}"
    if isinstance(error, Unhealthy):
        return 4, f"unhealthy training: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, Lost):
        return error.code, f"error: {error}" if str(error) else ""
    if is_lost_peer(error):
        return 5, f"lost a peer: {error}"
    return 1, "".join(traceback.format_exception(error))


def _report(code: int, text: str, place: Place) -> None:
    """Tell the launcher, if it shows the first error of the job, or else the user.

    Bad input and unhealthy training are mostly found by all ranks, and rank 0 speaks; who misses a peer lets that one
    speak.
    """
    log.error(text)
    if MEETING not in os.environ and (code == 5 or (code in (2, 4) and place.rank != 0)):
        let_others_speak(code)
    tell(code, text, place)
