"""Recording what a rank does with `torch.profiler`, with its notes, its process groups and its memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.distributed.health.activity import Activity
from megalite.profiling.trace import GROUP, NOTE, STEPS

QUIET = ("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler would tell on stderr that it begins and ends
MAX_EVENTS = 200_000  # allocations and frees that a snapshot of the memory goes back
CALLS = (  # methods of a process group that communicate
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
    "send",
    "recv",
)


class Recording:
    """The work of a rank from now until `end`. A failure to begin leaves nothing switched on.

    every_thread: record threads that begin later too, for which PyTorch leaves memory out. additions: JSON by key,
    which becomes a part of the trace. snapshot: once it has ended, the history of the memory on CUDA, as
    torch.cuda.memory dumps it; None on a CPU.
    """

    def __init__(self, activity: Activity, device: torch.device, every_thread: bool = False, **additions: str) -> None:
        os.environ.setdefault(*QUIET)
        self.snapshot: bytes | None = None
        cuda = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with ExitStack() as stack:
            if cuda:
                torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
                stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
                stack.callback(self._keep_snapshot)
                torch.cuda.synchronize(device)  # the first profiled step begins on an idle device
            threads = _ExperimentalConfig(profile_all_threads=every_thread)
            self._profile = profile(activities=kinds, profile_memory=True, experimental_config=threads)
            self._profile.start()
            stack.callback(self._profile.stop)
            for key, text in additions.items():
                self._profile.add_metadata_json(key, text)
            stack.enter_context(record_function(STEPS))
            stack.enter_context(noting(activity))
            if cuda:
                stack.callback(torch.cuda.synchronize, device)  # and the last one ends on one
            else:
                stack.enter_context(naming_groups())
            self._stack = stack.pop_all()

    def end(self) -> None:
        """Stop recording."""
        self._stack.close()

    def export(self, path: Path) -> None:
        """Write the trace in Chrome's format."""
        self._profile.export_chrome_trace(str(path))

    def _keep_snapshot(self) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder, "snapshot")
            torch.cuda.memory._dump_snapshot(str(path))
            self.snapshot = path.read_bytes()


@contextmanager
def noting(activity: Activity) -> Iterator[None]:
    """Record all that the rank notes meanwhile, each note until the next."""
    under_way: list[record_function] = []

    def end() -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    def note(what: object) -> None:
        end()  # by the thread that began it
        if what is None:
            return
        under_way.append(record_function(f"{NOTE}{what}"))
        under_way[0].__enter__()

    activity.follower = note
    try:
        yield
    finally:
        activity.follower = None
        end()


@contextmanager
def naming_groups() -> Iterator[None]:
    """Record which group every call of a process group is for. NCCL tells it by itself, gloo does not."""

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def recorded(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            with record_function(GROUP + group.group_name):
                return call(group, *args, **options)

        return recorded

    with ExitStack() as stack:
        for name in CALLS:
            if hasattr(dist.ProcessGroup, name):  # names differ between versions of PyTorch
                stack.enter_context(patch.object(dist.ProcessGroup, name, named(getattr(dist.ProcessGroup, name))))
        yield
