"""Offloading: activations wait for backward in host memory.

Autograd hands every tensor that it saves to a `Keep`, which may put it elsewhere. `Offload` copies each storage to the
host once, however many saved tensors view it, on a separate stream. When backward reaches a layer, the copies of the
layer before it also start to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.parallel.host_memory import HostMemory
from megalite.parallel.parameter import in_use
from megalite.plan.activations import OFFLOAD_SHARE


class Keep(Protocol):
    """Stores the tensors that one call of a layer saves for backward."""

    def pack(self, tensor: Tensor) -> Any:
        """Called in forward. Returns the object that is kept instead of `tensor`."""

    def unpack(self, packed: Any) -> Tensor:
        """Called in backward, once for each packed tensor. Returns that tensor."""


Keeping = Callable[[nn.Module, Sequence[Any]], Keep]  # takes the layer and the inputs of a call


class AsIs:
    """Keeps tensors where they are."""

    def __init__(self, layer: nn.Module, inputs: Sequence[Any]) -> None:
        pass

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        return packed


def keep(forward: Callable[..., Any], layer: nn.Module, keeping: Keeping, *inputs: Any) -> Any:
    """`forward(*inputs)`; the tensors that it saves for backward are stored by `keeping`."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    kept = keeping(layer, inputs)
    with saved_tensors_hooks(kept.pack, kept.unpack):
        return forward(*inputs)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """The identity of a tensor's storage. While the result lives, no other storage has the same identity."""
    return StorageWeakRef(tensor.untyped_storage())


def elsewhere(layer: nn.Module, inputs: Sequence[Any]) -> set[StorageWeakRef]:
    """Storages that stay allocated whether `layer` saves them or not: its weights, and inputs without gradient."""
    weights = [in_use(param) if isinstance(param, DTensor) else param for param in layer.parameters()]
    given = [x for value in inputs for x in (value if isinstance(value, tuple) else (value,))]
    shared = [x for x in given if isinstance(x, Tensor) and not x.requires_grad]
    return {storage_of(tensor) for tensor in (*weights, *shared)}


def to_host(tensor: Tensor, host: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    """Copy `tensor` to `host`, at once or, with a `stream`, asynchronously on that stream. Returns `host`."""
    if stream is None:
        return host.copy_(tensor)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return host


class Offload:
    """A `Keeping` that moves the tensors saved by the layers of one stage to `memory`."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = memory or HostMemory()
        self._size = 0  # bytes of a layer's input
        self._latest: Callable[[], _Call | None] = lambda: None

    def __call__(self, layer: nn.Module, inputs: Sequence[Any]) -> Keep:
        if self._size not in (0, inputs[0].nbytes):
            self._memory.trim()  # sizes of batches or sequences have changed: nothing fits the old blocks
        self._size = inputs[0].nbytes
        call = _Call(layer, inputs, self._memory, self._latest)
        self._latest = ref(call)
        return call


@dataclass(frozen=True)
class _Packed:
    call: _Call
    copy: _Copy
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class _Call:
    """The tensors that one call of a layer has saved. Tensors that backward still needs keep it and copies alive."""

    def __init__(
        self,
        layer: nn.Module,
        inputs: Sequence[Any],
        memory: HostMemory,
        previous: Callable[[], _Call | None],
    ) -> None:
        self.memory, self.previous = memory, previous
        self.least = inputs[0].nbytes // OFFLOAD_SHARE
        self.stays = elsewhere(layer, inputs)
        # Their weights have other storages by the time they are called, when FSDP2 gathers them.
        self.gathered_inside = [
            module for module in layer.modules() if module is not layer and isinstance(module, FSDPModule)
        ]
        self.copies: WeakValueDictionary[StorageWeakRef, _Copy] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        if tensor.nbytes < self.least or tensor.nbytes == 0 or storage in self.stays:
            return tensor
        if any(storage in elsewhere(module, ()) for module in self.gathered_inside):
            return tensor
        copy = self.copies.get(storage)
        if copy is None:
            self.copies[storage] = copy = _Copy(tensor, self.memory)
        copy.uses += 1
        return _Packed(self, copy, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Packed):
            return packed
        self.fetch()
        if (previous := self.previous()) is not None:
            previous.fetch()
        whole = packed.copy.take().view(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    def fetch(self) -> None:
        for copy in list(self.copies.values()):
            if copy.uses:
                copy.fetch()


class _Copy:
    """A storage's copy on the host. Once fetched, it is also on the device, until all its tensors have been used."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        self.device, self.memory, self.uses = tensor.device, memory, 0
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        host = memory.empty_like(whole)
        self.stream = memory.stream
        self.host = to_host(whole, host, self.stream)
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __del__(self) -> None:
        self.memory.give_back(self.host)

    def fetch(self) -> None:
        if self.fetched is not None:
            return
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            back = torch.empty_like(self.host, device=self.device)
            back.copy_(self.host, non_blocking=True)
        self.fetched = back, None if self.stream is None else self.stream.record_event()

    def take(self) -> Tensor:
        """The storage's elements on the device, fetched if necessary. Counts as one use."""
        self.fetch()
        assert self.fetched is not None
        back, arrived = self.fetched
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            back.record_stream(current)
        self.uses -= 1
        if self.uses <= 0:
            self.fetched = None
        return back
