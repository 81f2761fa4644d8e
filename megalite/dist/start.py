"""Start-up and end of a rank: device, process group, and what is left behind when the rank fails."""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megalite.config.errors import InputError
from megalite.dist.local import MEETING, error_file
from megalite.dist.ranks import Place, let_others_speak

log = logging.getLogger("megalite")
log.addHandler(logging.NullHandler())  # until the rank's log file is open, nothing is logged

LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "timed out",
    "connection refused",
    "broken pipe",
    "remote process exited",
)


def start(place: Place, device: Literal["auto", "cpu", "cuda"], timeout: float) -> torch.device:
    """Join the job: pick this rank's device and open the default process group.

    timeout: seconds that a rank waits for its peers in one collective. Raises InputError when the device or
    the address of rank 0 is missing.
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
        wait = timedelta(seconds=timeout)
        dist.init_process_group(backend, _address(), wait, place.world_size, place.rank)
    return torch.device(kind, place.local_rank) if kind == "cuda" else torch.device("cpu")


def start_alone() -> None:
    """A process group of this process alone, for tools that read a model; no launcher, no network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _address() -> str:
    """Where the ranks meet."""
    folder = os.environ.get(MEETING)
    if folder or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if folder:
        return f"file://{folder}/store"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"{' and '.join(missing)} must name the node and port of rank 0; see launch/slurm.sbatch")
    return "env://"


def run_rank(main: Callable[[], int], place: Place) -> int:
    """Run `main` as one rank and return its exit code; if it fails, report and end the process at once.

    What `main` returns is the verdict of the whole job, the same on every rank. A failing rank must not wait for
    its peers in some destructor: they notice its death, and fail too.
    """
    _die_with_launcher()
    try:
        code = main()
        if dist.is_initialized():
            dist.barrier()  # the first rank to end with another code than 0 ends the job: let all say their last words
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure is reported, then ends the process
        code, text = _explain(error)
        _report(code, text, place)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code != 0 and MEETING in os.environ:
        _tell_launcher(code, "", place)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the message that an error calls for."""
    if isinstance(error, InputError):
        return 2, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST_PEER):
        return 5, f"lost a peer: {error}"
    return 1, "".join(traceback.format_exception(error))


def _report(code: int, text: str, place: Place) -> None:
    """Tell the launcher, if it shows the first error of the job, or else the user.

    Bad input is mostly found by all ranks, and rank 0 speaks; who misses a peer lets that one speak.
    """
    log.error(text)
    if MEETING in os.environ:
        _tell_launcher(code, text, place)
        return
    if code == 5 or (code == 2 and place.rank != 0):
        let_others_speak(code)
    if torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        Path(torchrun).write_text(json.dumps({"message": report}))
    else:
        print(f"megalite: rank {place.rank} on {socket.gethostname()}: {text}", file=sys.stderr)


def _tell_launcher(code: int, text: str, place: Place) -> None:
    """Leave the local launcher a report; without text, `code` is a verdict that needs no explanation."""
    report = {"time": time.time(), "rank": place.rank, "code": code, "error": text}
    path = error_file(Path(os.environ[MEETING]), place.rank)
    partial = path.with_suffix(".partial")  # the launcher may stop this process at any moment
    partial.write_text(json.dumps(report))
    partial.rename(path)


def _die_with_launcher() -> None:
    """Ranks started by the local launcher or by torchrun must not outlive it, even if it is killed (Linux)."""
    if {MEETING, "TORCHELASTIC_RUN_ID"} & os.environ.keys() and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
