"""Start-up and end of a rank: its device, its process group, and the exit code and message of a failure."""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megalite.base.errors import InputError, Unhealthy, counted
from megalite.base.exit_codes import ExitCode
from megalite.base.output import Lost
from megalite.distributed.start.allocator import keep_freed_memory
from megalite.distributed.start.failure_report import log, note_end, note_failure, tell
from megalite.distributed.start.local import MEETING
from megalite.distributed.start.meeting import LostPeer, Meeting, meet
from megalite.distributed.start.ranks import RankInfo, let_others_speak
from megalite.distributed.start.signals import die_with_launcher, hear

NCCL = {  # variables of PyTorch, unless the environment sets them, so that our watchdog ends a job and says why
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its own thread aborts the process when a peer is lost
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it waits for dumps of all ranks, and aborts the process then
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else the process is aborted when that thread hangs, in a lost peer's call
}
# NCCL would register the tensors of captured collectives with other GPUs, which fails or reads wrong memory where these
# are in expandable segments, as they are by default.
GRAPH_REGISTRATION = "NCCL_GRAPH_REGISTER"
LOST_PEER_SIGNS = (
    "closed by peer",
    "reset by peer",
    "timed out",
    "connection refused",
    "broken pipe",
    "remote process exited",
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of a collective means that another rank is gone."""
    if isinstance(error, LostPeer | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST_PEER_SIGNS)


def start(
    rank_info: RankInfo, device: Literal["auto", "cpu", "cuda"], timeout: float, meeting: Meeting | None = None
) -> torch.device:
    """Join the job: pick this rank's device and open the default process group.

    timeout: seconds that a rank waits for its peers in one collective. meeting: None, if the ranks have not met yet.
    Raises InputError when the device or the address of rank 0 is missing.
    """
    kind = _kind(device)
    if kind == "cuda":
        count = torch.cuda.device_count()
        if rank_info.local_rank >= count:
            raise InputError(
                f"run.device={device}: this node runs at least {rank_info.local_rank + 1} ranks but has "
                f"{counted(count, 'GPU')}; start one rank per GPU, or set run.device=cpu"
            )
        torch.cuda.set_device(rank_info.local_rank)
        _leave_errors_to_us()
        os.environ.setdefault(GRAPH_REGISTRATION, "0")
    else:
        keep_freed_memory()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = (meeting or meet(rank_info, timeout)).store
        wait = timedelta(seconds=timeout)
        # No `device_id`: barriers would run over NCCL, which tells of no lost peer, and new groups would be split from
        # this one by all ranks, which hold Python's lock meanwhile. `Mesh.build` connects all groups early anyway.
        dist.init_process_group(backend, None, wait, rank_info.world_size, rank_info.rank, store)
    return torch.device(kind, rank_info.local_rank) if kind == "cuda" else torch.device("cpu")


def _leave_errors_to_us() -> None:
    """Set `NCCL`, and note in the log where the environment says otherwise."""
    for name, ours in NCCL.items():
        found = os.environ.setdefault(name, ours)
        if found != ours:
            log.warning("%s=%s: PyTorch may end a rank before the watchdog has told why; unset it", name, found)


def start_alone(device: Literal["auto", "cpu", "cuda"] = "cpu") -> torch.device:
    """Open a process group of this process alone, for a device; no launcher, no network. Raises InputError."""
    kind = _kind(device)
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")


def _kind(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def run_rank(main: Callable[[], int], rank_info: RankInfo) -> int:
    """Run `main` as one rank and return its exit code; if it fails, report and end the process at once.

    The code that `main` returns is the verdict of the whole job, the same on every rank. A failing rank must not wait
    for its peers in some destructor: they notice its death, and fail too.
    """
    die_with_launcher()
    try:
        hear()
        code = main()
        if dist.is_initialized():
            dist.barrier()  # the first rank to end with a code but DONE ends the job: let all say their last words
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure is reported, then ends the process
        code, text = explain(error)
        _report(code, text, rank_info)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == ExitCode.DONE:
        note_end(code, rank_info)
    else:
        tell(code, "", rank_info)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the message that an error calls for."""
    if isinstance(error, InputError):
        return ExitCode.BAD_INPUT, f"error: {error}"
    if isinstance(error, Unhealthy):
        return ExitCode.UNHEALTHY, f"unhealthy training: {error}"
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, Lost):
        return error.code, f"error: {error}" if str(error) else ""
    if is_lost_peer(error):
        return ExitCode.LOST_CONTACT, f"lost a peer: {error}"
    return ExitCode.FAILED, "".join(traceback.format_exception(error))


def _report(code: int, text: str, rank_info: RankInfo) -> None:
    """Report an error: to the launcher, if it shows the first error of the job, or else to the user.

    Bad input and unhealthy training are mostly found by all ranks, and rank 0 speaks. A rank that misses a peer lets
    that peer speak.
    """
    log.error(text)
    note_failure(code, text, rank_info)
    found_by_all = code in (ExitCode.BAD_INPUT, ExitCode.UNHEALTHY)
    if MEETING not in os.environ and (code == ExitCode.LOST_CONTACT or (found_by_all and rank_info.rank != 0)):
        let_others_speak(code)
    tell(code, text, rank_info)
