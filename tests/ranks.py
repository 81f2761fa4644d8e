"""Eight gloo ranks that stay up for the whole test session: starting them takes longer than most tests.

Every task has a time limit. When a rank fails or hangs, all are killed and the next task gets new ones.
"""

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from warm_start import FORKS

from megalite.distributed.mesh import Mesh

SIZE = 8
THREADS = 2  # for collectives of a group, as PyTorch has by default
START = 120.0  # seconds allowed for new ranks to import PyTorch and meet, on a busy machine


class Ranks:
    """Runs functions of this test suite on all ranks at once."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._meeting: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """What `function(*args)` returns on every rank. Raises what went wrong first."""
        deadline = time.monotonic() + timeout
        if not self._processes:
            self._start()
            deadline += START
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < SIZE:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(SIZE)) - results.keys())
                self.stop()
                raise TimeoutError(f"{function.__name__}: ranks {missing} not done after {timeout} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    failed, results[rank] = True, "died"
                if failed:
                    self.stop()
                    raise RuntimeError(f"rank {rank}: {results[rank]}")
        return [results[rank] for rank in range(SIZE)]

    def _start(self) -> None:
        self._meeting = tempfile.TemporaryDirectory(prefix="megalite-test-")
        meeting = Path(self._meeting.name) / "rendezvous"
        for rank in range(SIZE):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(rank, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        if self._meeting is not None:
            self._meeting.cleanup()
            self._meeting = None


def _share_groups() -> None:
    """Make a process group once for every set of ranks, whatever it is for: gloo holds its threads for good.

    A few dozen sets make up the meshes of all layouts, which would otherwise have hundreds of groups. Those of
    checkpoints are apart: their collectives run in threads beside others.
    """
    make: Callable[..., Any] = distributed_c10d.new_group
    made: dict[Any, Any] = {}

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        purpose = options.get("group_desc") or ""
        key = None if ranks is None else tuple(ranks), purpose if "checkpoints" in purpose else ""
        if key not in made:
            made[key] = make(ranks, *args, **options)
        return made[key]

    for module in (dist, distributed_c10d, device_mesh):
        module.new_group = new_group


def _share_device() -> None:
    """Give all groups of this rank one gloo device: each device has a thread, which wakes up a hundred times a second.

    After a while eight ranks have hundreds of groups, and so many threads that wake up take a good part of a core.
    """
    kind = dist.ProcessGroupGloo
    make, device = kind.__init__, kind.create_device(interface="lo")

    def with_device(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = kind._Options()
        options._devices, options._timeout, options._threads = [device], timeout, THREADS
        make(group, store, rank, size, options)

    kind.__init__ = with_device  # type: ignore[method-assign]


def _serve(rank: int, meeting: Path, pipe: Connection) -> None:
    gc.freeze()  # as `megalite train` does: every start of training would look at all that PyTorch has
    torch.set_num_threads(1)
    _share_device()
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(seconds=60), SIZE, rank)
    Mesh.build = staticmethod(cache(Mesh.build))
    _share_groups()
    with suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((False, function(*args)))
            except Exception:  # noqa: BLE001 - whatever happened is reported to the test
                pipe.send((True, traceback.format_exc()))
