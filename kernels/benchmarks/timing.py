"""Time of calls on a GPU, in turns, each with cold caches and with its launches queued beforehand.

Two events on the stream measure what lies between them, and with it any wait for the host to launch the next kernel.
So before the first of both the GPU is given as much else to do as the host takes for the call: writing over its cache,
again and again. Then the events measure the time of the kernels alone, for all calls alike; the time of the host is
measured apart.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

MIN_ROUNDS = 10
GROUP_SECONDS = 6.0  # seconds for all rounds of one group of calls, unless there would be fewer than MIN_ROUNDS
WARM_UP = 3  # calls before anything is measured, of which the first compiles
COPY_BYTES = (1 << 30, 1 << 31, 1 << 32)
MAX_LEAD = 0.02  # seconds; what takes the host longer waits for the GPU anyway
FLUSHED_BYTES = 1 << 28  # at least four times any cache of today


@dataclass(frozen=True)
class Call:
    """A call to time: `run(prepare())`, of which only `run` is timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Warm:
    """Measurements of a call before it is timed: seconds of the host, bytes at most allocated, seconds of a turn."""

    host: float
    peak: int
    turn: float

    @property
    def lead(self) -> float:
        """Seconds of other work that the GPU gets before the call: twice the host's time, because that varies."""
        return min(2 * self.host, MAX_LEAD)


@dataclass(frozen=True)
class Spread:
    """The 10th percentile, the median and the 90th percentile of `rounds` rounds, in seconds."""

    p10: float
    median: float
    p90: float
    rounds: int


class Gpu:
    """The clocks and the memory of a CUDA device; all that needs one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, FLUSHED_BYTES)
        self._scratch = torch.empty(size, dtype=torch.int8, device=device)
        self._flush_seconds = math.inf
        flush = Call(lambda _: self._scratch.zero_())
        self._flush_seconds = spread(take_turns({"": (flush, 0.0)}, self, MIN_ROUNDS)[""]).median

    def keep_busy(self, seconds: float) -> None:
        """Write over the cache, once and as often again as takes `seconds`."""
        for _ in range(1 + math.ceil(seconds / self._flush_seconds)):
            self._scratch.zero_()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free(self) -> int:
        """Bytes that can be allocated, after what nothing uses any more is given back."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def now(self) -> float:
        return time.perf_counter()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Bytes at most allocated since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


def warm_up(call: Call, gpu: Gpu) -> Warm:
    """Compile, and measure what needs no rounds. Peak memory is above what is allocated before `prepare`."""
    for _ in range(WARM_UP):
        call.run(call.prepare())
    hosts = []
    for _ in range(WARM_UP):
        gpu.synchronize()
        before, began = gpu.allocated(), gpu.now()
        given = call.prepare()
        gpu.synchronize()
        gpu.reset_peak()
        called = gpu.now()
        result = call.run(given)
        hosts.append(gpu.now() - called)
        peak = gpu.peak() - before
        gpu.synchronize()
        turn = gpu.now() - began
        del given, result
    return Warm(statistics.median(hosts), peak, turn)


def rounds_for(warm: Iterable[Warm], most: int) -> int:
    """Return the number of rounds in which to run these calls: at most `most`."""
    turns = sum(each.turn + each.lead for each in warm)
    return min(most, max(MIN_ROUNDS, int(GROUP_SECONDS / turns)))


def take_turns(calls: Mapping[str, tuple[Call, float]], gpu: Gpu, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every call, each given with its lead.

    All calls run once in every round, so that clocks and other load meet all alike, another one first each time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        first = number % len(names)
        events = {}
        for name in names[first:] + names[:first]:
            call, lead = calls[name]
            given = call.prepare()
            gpu.keep_busy(lead)
            start, end = gpu.event(), gpu.event()
            start.record()
            result = call.run(given)
            end.record()
            del given, result
            events[name] = start, end
        gpu.synchronize()
        for name, (start, end) in events.items():
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def spread(seconds: list[float]) -> Spread:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(tenths[0], statistics.median(seconds), tenths[-1], len(seconds))


def spreads(calls: Mapping[str, Call], warm: Mapping[str, Warm], gpu: Gpu, rounds: int) -> dict[str, Spread]:
    """Time calls that are warm, in at most `rounds` rounds; return the spread of each in seconds."""
    turns = {name: (call, warm[name].lead) for name, call in calls.items()}
    seconds = take_turns(turns, gpu, rounds_for(warm.values(), rounds))
    return {name: spread(each) for name, each in seconds.items()}


def copied_sizes(free: int) -> list[int]:
    """Bytes: what is copied to measure bandwidth, all at a time there, far larger than any cache."""
    return [size for size in COPY_BYTES if 8 * size <= free] or [free // 16 * 2]


def copies(device: torch.device, sizes: Iterable[int]) -> dict[str, tuple[int, Call]]:
    """Return, for every size, the driver's copy and an elementwise kernel: bytes read and written, and the call."""
    found = {}
    for size in sizes:
        source = torch.randn(size // 2, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        found[f"copy of {size} bytes"] = 2 * size, _on(source, target.copy_)
        found[f"negation of {size} bytes"] = 2 * size, _on(source, partial(torch.neg, out=target))
    return found


def _on(source: Tensor, run: Callable[[Tensor], Tensor]) -> Call:
    return Call(lambda _: run(source))


def copy_bandwidths(gpu: Gpu, copies: Mapping[str, tuple[int, Call]], rounds: int) -> dict[str, float]:
    """Bytes per second of every copy, by the median of its rounds."""
    calls = {name: call for name, (_, call) in copies.items()}
    warm = {name: warm_up(call, gpu) for name, call in calls.items()}
    return {name: copies[name][0] / each.median for name, each in spreads(calls, warm, gpu, rounds).items()}
