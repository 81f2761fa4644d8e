"""Copies of a rank's tensors in host memory, which are written while training goes on."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megalite.optim.interface import Optimizer
from megalite.parallel.host_memory import HostMemory


class Staging:
    """Copies tensors to host memory that every save uses again, on a stream of their own where they are on a GPU.

    The next step runs beside the copies; its update of the optimizer waits for them on the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._memory = HostMemory()
        self._copies: dict[str, Tensor] = {}
        self._ready: torch.cuda.Event | None = None  # recorded behind the latest copies
        self._closed = False
        optimizer.register_step_pre_hook(self._hold)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the host memory for copies of `tensors`, which takes seconds for what a GPU holds."""
        for name, tensor in tensors.items():
            if self._closed:
                return
            if name not in self._copies:
                self._copies[name] = self._memory.empty_like(tensor)

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy `tensors`; return the copies by name, which hold their values once `wait` has returned."""
        self.reserve(tensors)
        stream = self._memory.stream
        beside: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            beside = torch.cuda.stream(stream)
        with beside:
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor, non_blocking=True)
        self._ready = stream.record_event() if stream is not None else None
        return self._copies

    def wait(self) -> None:
        """Wait until the latest copies hold their values."""
        if self._ready is not None:
            self._ready.synchronize()

    def close(self) -> None:
        """Give the host memory back. Does not wait: copies must have ended before."""
        self._closed = True
        self._memory.close()

    def _hold(self, *_: Any) -> None:
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
