"""A CUDA device without one."""

from types import SimpleNamespace

import torch
from rounding import DEVICE


class FakeGpu:
    """A device whose clock advances when a test says so, and by what it is kept busy for."""

    def __init__(self, device: torch.device = DEVICE, ticks: float = 0.0) -> None:
        self.device = device
        self.time = 0.0
        self.ticks = ticks  # seconds between two looks at the clock
        self.leads: list[float] = []

    def now(self) -> float:
        self.time += self.ticks
        return self.time

    def keep_busy(self, seconds: float) -> None:
        self.leads.append(seconds)
        self.time += 100

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now())
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def free(self) -> int:
        return 1 << 20

    def allocated(self) -> int:
        return 1000

    def peak(self) -> int:
        return 5000
