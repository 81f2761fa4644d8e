"""The clock of the probe, and its record of figures, in which one that fails leaves the others."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from megalite_kernels.benchmarks.timing import Call, Gpu, Spread, spread, spreads, warm_up

ROUNDS = 10
ROUNDS_ON_CPU = 3
ERROR_LENGTH = 300  # characters of an exception that are recorded
OMISSION, ERROR = "not_measured", "error"  # keys of a figure that has no value
OUT_OF_TIME = {OMISSION: "out of time"}


class CallTimer:
    """Times calls on one device: by events and with cold caches on CUDA, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu = Gpu(device) if device.type == "cuda" else None

    def times(self, call: Call) -> Spread:
        """Seconds of a call that has run before, so that it is compiled and its memory allocated."""
        if self._gpu is not None:
            return spreads({"": call}, {"": warm_up(call, self._gpu)}, self._gpu, ROUNDS)[""]
        call.run(call.prepare())
        return spread([_elapsed(call) for _ in range(ROUNDS_ON_CPU)])

    def sustained(self, run: Callable[[], object], each: float, seconds: float, meanwhile: Callable[[], None]) -> float:
        """Seconds of a call when it runs without a pause for about `seconds`, in which a GPU sinks to its power limit.

        each: seconds of a single call. meanwhile: runs once, when all calls are launched; CUDA queues a thousand, so
        the device is still busy if these take long enough.
        """
        count = max(math.ceil(seconds / each), 1)
        self._synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        meanwhile()
        self._synchronize()
        return (time.perf_counter() - start) / count

    def free(self) -> int | None:
        """Bytes that can be allocated on a GPU, after what nothing uses any more is given back. None for a CPU."""
        if self._gpu is not None:
            return self._gpu.free()
        gc.collect()
        return None

    def _synchronize(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()


class Figures:
    """The figures of one group, by name.

    tiny: whether sizes are those of a rehearsal. deadline: of `time.monotonic`; no figure starts after it.
    """

    def __init__(self, clock: CallTimer, tiny: bool, deadline: float) -> None:
        self.clock, self.tiny, self.deadline = clock, tiny, deadline
        self.device = clock.device
        self.found: dict[str, Any] = {}

    def measure(self, name: str, work: Callable[[], Any], needs: float = 0.0) -> None:
        """Record what `work` returns, or how it fails. It does not start unless `needs` seconds are left."""
        if time.monotonic() + needs >= self.deadline:
            self.found[name] = OUT_OF_TIME
            return
        self.found[name] = attempt(work)
        if ERROR in self.found[name]:
            with suppress(Exception):  # a device that fails to synchronize has been recorded already
                self.clock.free()


def attempt(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or a record of how it failed: kernels of other projects may fail in any way."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is recorded
        return {ERROR: f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_LENGTH]}"}


def timed(times: Spread, **rates: float) -> dict[str, float]:
    """A figure: milliseconds, and rates by their units, to five digits."""
    values = {"ms": times.median * 1e3, "p10_ms": times.p10 * 1e3, "p90_ms": times.p90 * 1e3, **rates}
    return {name: digits(value) for name, value in values.items()}


def digits(value: float) -> float:
    """The value to five significant digits."""
    return float(f"{value:.5g}")


def _elapsed(call: Call) -> float:
    given = call.prepare()
    start = time.perf_counter()
    call.run(given)
    return time.perf_counter() - start
