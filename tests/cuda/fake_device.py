"""What Python sees of the devices of `fake_cuda`: `torch.cuda`, and where tensors on them come from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, cuda
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAKE = FakeTensorMode(allow_non_fake_inputs=True)
NAME = "NVIDIA H100 80GB HBM3"
_kept: list[Any] = []


class Stream(torch.Stream):
    """Does nothing, and tells `NOTES` in which order it was told to."""

    def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
        return super().__new__(cls, device=torch.device("cuda" if device is None else device), priority=priority)

    def wait_stream(self, other: torch.Stream) -> None:
        NOTES.append(("wait", self, other))

    def wait_event(self, event: Any) -> None:
        NOTES.append(("wait", self, event))

    def record_event(self, event: Any = None) -> "Event":
        return Event().record(self)

    def synchronize(self) -> None:
        NOTES.append(("synchronize", self))


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Any = None

    def record(self, stream: Any = None) -> "Event":
        self.stream = stream or cuda.current_stream()
        return self

    def wait(self, stream: Any = None) -> None:
        NOTES.append(("wait", stream or cuda.current_stream(), self))

    def synchronize(self) -> None:
        NOTES.append(("synchronize", self.stream))

    def query(self) -> bool:
        return True


NOTES: list[tuple[Any, ...]] = []
CAPTURED: list["Calls"] = []  # the operations of each graph
WAITED: list[dist.Work] = []  # collectives that were waited for
REFUSED = 2  # cudaErrorMemoryAllocation
refuses = False  # whether CUDA registers no more host memory
_current: list[Any] = []


class CUDAGraph:
    """Has nothing to do again."""

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        NOTES.append(("replay", self))


@contextmanager
def _graph(graph: CUDAGraph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """Notes operations instead of capturing them."""
    NOTES.append(("capture", graph, pool, stream, capture_error_mode))
    with _stream(stream), Calls() as calls:
        CAPTURED.append(calls)
        yield
    NOTES.append(("captured", graph))


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


class Cudart:
    """What CUDA is asked for without PyTorch in between."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        NOTES.append(("register", address, size, flags))
        return REFUSED if refuses else 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        NOTES.append(("unregister", address))
        return 0


def install() -> None:
    _current.append(Stream())
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "cudart": lambda: Cudart,
        "graph": _graph,
        "stream": _stream,
        "current_stream": lambda device=None: _current[-1],
        "synchronize": lambda device=None: NOTES.append(("synchronize", device)),
        "set_device": lambda device: NOTES.append(("set_device", device)),
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: SimpleNamespace(name=NAME, total_memory=80 << 30, major=9),
    }
    for name, fake in fakes.items():
        setattr(cuda, name, fake)
    torch.accelerator.current_stream = cuda.current_stream
    Tensor.record_stream = lambda tensor, stream: NOTES.append(("record", tensor, stream))  # type: ignore[method-assign]
    FakeWork.is_completed = lambda _: True
    FakeWork.wait = lambda work, *_: WAITED.append(work)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    _kept.append(library)


def _empty(size: Sequence[int], *, device: torch.device, dtype: Any = None, **_: Any) -> Tensor:
    with FAKE:
        return torch.empty(size, dtype=dtype, device=device)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, device: torch.device, dtype: Any = None, **_: Any
) -> Tensor:
    with FAKE:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """This process as `rank` of a job of `size`, whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Calls(TorchDispatchMode):
    """The operations that run while it is active, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.begun: list[dist.Work] = []  # collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        result = func(*args, **kwargs or {})
        if func.namespace == "c10d":
            objects = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject))
            self.begun += map(dist.Work.unbox, objects)
        return result

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments of every call of the operation `namespace::name`."""
        return [(args, kwargs) for func, args, kwargs in self.seen if func._schema.name == name]

    def groups(self) -> dict[str, set[tuple[int, ...]]]:
        """The ranks of every group of two or more that a collective ran over, and of those that a transfer did."""
        found: dict[str, set[tuple[int, ...]]] = {"collectives": set(), "transfers": set()}
        for func, args, _ in self.seen:
            if func.namespace == "c10d":
                kind = "transfers" if func._schema.name in ("c10d::send", "c10d::recv_") else "collectives"
                objects = (arg for arg in args if isinstance(arg, torch.ScriptObject))
                (group,) = (arg for arg in objects if arg._type().name() == "ProcessGroup")
                name = dist.ProcessGroup.unbox(group).group_name
                ranks = tuple(dist.get_process_group_ranks(distributed_c10d._resolve_process_group(name)))
                if len(ranks) > 1:
                    found[kind].add(ranks)
        return found
