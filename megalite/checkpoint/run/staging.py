"""Copies of a rank's tensors in host memory or a scratch file, which are written while training goes on."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.store.state import is_state
from megalite.optim.file_pieces import copy
from megalite.optim.interface import Optimizer
from megalite.optim.scratch_file import ScratchFile
from megalite.parallel.host_memory import HostMemory


class Staging:
    """Copies tensors to host memory that every save uses again, on a stream of their own where they are on a GPU.

    The next step runs beside the copies; its update of the optimizer waits for them on the device. file: where states
    of the optimizer are copied to instead; None: nowhere.
    """

    def __init__(self, optimizer: Optimizer, file: ScratchFile | None = None) -> None:
        self._memory, self._file = HostMemory(), file
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
                self._copies[name] = self._room(name, tensor)

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
                copy(tensor, self._copies[name])
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

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        if self._file is None or not is_state(name):
            return self._memory.empty_like(tensor)
        return self._file.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def _hold(self, *_: Any) -> None:
        if self._ready is not None:
            torch.cuda.current_stream().wait_event(self._ready)
