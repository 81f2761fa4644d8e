"""Stores of optimizer states: each knows one place where states live from step to step, and how an update gets at them.

An optimizer keeps the tensors that a store makes. An update runs where the states are, as `HostAdamW` does, or the
states pass through the device bucket by bucket and are changed there, as `StreamedAdamW` and `Muon` do.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.optim.scratch_file import REQUEST_BYTES, THREADS, StateFile
from megalite.optim.streams import Bucket, Resident, Source, Streams, as_bytes, split
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.parameter import dtensor
from megalite.plan.state_streams import BLOCK, BUCKET_BYTES, FILE_SLOTS, padded


class States(Protocol):
    """Makes states of parameters in one place, and moves them for updates on the device.

    on_device: whether states live there, so that streaming them takes no memory.
    """

    on_device: bool

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """A new state of a parameter: its shape and placement, the local part where states live."""

    def streamed(self, buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bucket]:
        """Yield the local states of each bucket on the device, to be changed in place until the next are asked for.

        The iterator must be exhausted. Tensors of a bucket take at most `slot_bytes`, each in whole blocks.
        """

    def buffers(self) -> Sequence[Tensor]:
        """Tensors in host memory, beside states, that are kept from step to step."""

    def settle(self) -> None:
        """Wait until the host may read the states."""


class DeviceStates:
    """Keeps states on the device of their parameter."""

    on_device = True

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        return placed_as(param, torch.zeros_like(local(param), dtype=dtype))

    def streamed(self, buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bucket]:
        return iter(buckets)

    def buffers(self) -> list[Tensor]:
        return []

    def settle(self) -> None:
        pass


class HostStates:
    """Keeps states in host memory, on CUDA page-locked. slot_bytes: the most that a bucket takes.

    device: where states are updated; None: on the device of their parameter. Tensors that others keep in host memory
    may be streamed too.
    """

    on_device = False

    def __init__(self, slot_bytes: int = BUCKET_BYTES, device: torch.device | None = None) -> None:
        self.memory, self.slot_bytes, self.device = HostMemory(), slot_bytes, device
        self._streams = Streams()

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        like = torch.empty_like(local(param), dtype=dtype, device="meta")
        return placed_as(param, self.memory.empty_like(like, self.updates_on(param)).zero_())

    def updates_on(self, param: Tensor) -> torch.device:
        """The device on which states of a parameter are updated."""
        return self.device or param.device

    def streamed(self, buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bucket]:
        return self._streams.stream(Resident(buckets), device, self.slot_bytes)

    def buffers(self) -> list[Tensor]:
        return []

    def settle(self) -> None:
        self._streams.settle()


class FileStates:
    """Keeps states in `file`, through page-locked buffers of host memory on CUDA.

    States are tensors that know which bytes of the file are theirs: updates stream them, and checkpoints use
    `file_pieces`. device: as for `HostStates`.
    """

    on_device = False

    def __init__(self, file: StateFile, slot_bytes: int = BUCKET_BYTES, device: torch.device | None = None) -> None:
        self.file, self.slot_bytes, self.device, self.memory = file, slot_bytes, device, HostMemory()
        self._streams, self._slots = Streams(), list[Tensor]()
        self._threads = ThreadPoolExecutor(THREADS, "states")

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        part = local(param)
        if not self._slots:
            like = torch.empty(self.slot_bytes + BLOCK, dtype=torch.uint8, device="meta")
            self._slots = [self.memory.empty_like(like, self.updates_on(param)) for _ in range(FILE_SLOTS)]
        state = self.file.take(part.numel() * dtype.itemsize)
        return placed_as(param, state.view(dtype).view(part.shape))

    def updates_on(self, param: Tensor) -> torch.device:
        """The device on which states of a parameter are updated."""
        return self.device or param.device

    def streamed(self, buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bucket]:
        return self._streams.stream(self.source(buckets), device, self.slot_bytes)

    def source(self, buckets: Sequence[Bucket]) -> Source:
        """The buckets in host memory, which they pass through on their way from the file and back."""
        return _Filed(buckets, self.file, [self.file.aligned(slot) for slot in self._slots], self._threads)

    def buffers(self) -> list[Tensor]:
        return self._slots

    def settle(self) -> None:
        """Wait for nothing: a stream ends when all is in the file."""


class _Filed:
    """A `Source` of buckets in a file: some are read ahead, and written while others are updated."""

    def __init__(
        self, buckets: Sequence[Bucket], file: StateFile, slots: Sequence[Tensor], threads: ThreadPoolExecutor
    ) -> None:
        self.buckets, self._file, self._slots, self._threads = buckets, file, slots, threads
        self._read: dict[int, list[Future[None]]] = {}
        self._written: dict[int, list[Future[None]]] = {}
        for number in range(min(len(buckets), FILE_SLOTS - 2)):
            self._begin(number)

    def ready(self, number: int) -> Sequence[Tensor]:
        if (ahead := number + FILE_SLOTS - 2) < len(self.buckets):
            self._begin(ahead)
        for read in self._read.pop(number):
            read.result()
        return split(self._slot(number), self.buckets[number])

    def changed(self, number: int, copied: torch.cuda.Event | None) -> None:
        def write(buffer: Tensor, target: Tensor) -> None:
            if copied is not None:
                copied.synchronize()
            self._file.write(buffer, target)

        self._written[number] = [self._threads.submit(write, buffer, state) for state, buffer in self._requests(number)]

    def end(self) -> None:
        for number in [*self._written]:
            self._wait(number)

    def _begin(self, number: int) -> None:
        """Begin to read a bucket, once the one before in its slot is written."""
        self._wait(number - FILE_SLOTS)
        self._read[number] = [
            self._threads.submit(self._file.read, state, buffer) for state, buffer in self._requests(number)
        ]

    def _wait(self, number: int) -> None:
        for written in self._written.pop(number, ()):
            written.result()

    def _slot(self, number: int) -> Tensor:
        return self._slots[number % FILE_SLOTS]

    def _requests(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of a bucket's states, as bytes of the file, and their buffers, which reach to the end of a block."""
        first, slot = 0, self._slot(number)
        for state in map(as_bytes, self.buckets[number]):
            for start in range(0, len(state), REQUEST_BYTES):
                part = state[start : start + REQUEST_BYTES]
                yield part, slot[first + start : first + start + padded(len(part))]
            first += padded(len(state))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as(param: Tensor, part: Tensor) -> Tensor:
    """A tensor with the global shape and placement of `param`, of which this rank has `part`."""
    return dtensor(part, param._spec) if isinstance(param, DTensor) else part
