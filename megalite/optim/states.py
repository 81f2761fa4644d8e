"""Stores of optimizer states: each knows one place where states live from step to step, and how an update gets at them.

An optimizer keeps the tensors that a store makes. An update either runs where the states are, as `HostAdamW` does, or
fetches a state to the device, changes it there and puts it back, as `Muon` does, whose matrix products need the device.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.config.schema import Place
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.parameter import dtensor


class States(Protocol):
    """Makes states of parameters in one place, and moves them for updates on the device.

    on_device: whether states live there, so that fetching them takes no memory.
    """

    on_device: bool

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """A new state of a parameter: its shape and placement, the local part where states live."""

    def fetch(self, state: Tensor, device: torch.device) -> Tensor:
        """A local state, or a view of one, on the device, to be changed in place and given to `put`."""

    def put(self, state: Tensor, fetched: Tensor) -> None:
        """Write `fetched`, which `fetch` gave for `state` and which was changed in place, back to `state`."""

    def settle(self) -> None:
        """Wait until the host may read what `put` has written."""


class DeviceStates:
    """Keeps states on the device of their parameter."""

    on_device = True

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        return placed_as(param, torch.zeros_like(local(param), dtype=dtype))

    def fetch(self, state: Tensor, device: torch.device) -> Tensor:
        return state

    def put(self, state: Tensor, fetched: Tensor) -> None:
        pass

    def settle(self) -> None:
        pass


class HostStates:
    """Keeps states in host memory, on CUDA page-locked.

    Copies run on the device's current stream, in the order of its work. So a fetched state takes memory for its own
    update only: on a stream beside, a host far ahead of its device would fetch the states of all matrices.
    """

    on_device = False

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._last: torch.cuda.Event | None = None  # end of the latest copy to the host

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        return placed_as(param, self.memory.empty_like(local(param).detach().to(dtype)).zero_())

    def fetch(self, state: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(state, device=device).copy_(state, non_blocking=True)

    def put(self, state: Tensor, fetched: Tensor) -> None:
        state.copy_(fetched, non_blocking=True)
        if fetched.is_cuda:
            self._last = torch.cuda.current_stream(fetched.device).record_event()

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()
            self._last = None


STORES: dict[Place, Callable[[], States]] = {"device": DeviceStates, "host": HostStates}


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_as(param: Tensor, part: Tensor) -> Tensor:
    """A tensor with the global shape and placement of `param`, of which this rank has `part`."""
    return dtensor(part, param._spec) if isinstance(param, DTensor) else part
