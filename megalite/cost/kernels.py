"""The time of kernels on one GPU: matrix products, attention, and passes over memory. Imports no torch."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil

from megalite.base.errors import InputError, Problem
from megalite.cost.cluster import Gpu
from megalite.cost.constants import FITTED_CONSTANTS, Constants

TILES = (  # tiles of the result that one multiprocessor makes at a time: rows, columns, share of the best rate
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (256, 64, 0.85),
    (64, 256, 0.85),
    (128, 64, 0.78),
    (64, 128, 0.78),
    (64, 64, 0.62),
)
DEPTH = 32  # elements of the sum that a tile takes at a time
SPLITS = (1, 2, 4)  # into how many parts a long sum may be divided, so that more tiles run at once
MIN_SPLIT_ELEMENTS = 512  # elements of the sum whose time such a part takes at least
SPLIT_COST = 0.02  # for every further part, to add up the parts
VECTOR_ELEMENTS = 8  # rows of other lengths cannot be loaded in whole vectors
MISALIGNMENT_FACTOR = 2.0  # how much longer such products take
# Watts that a FLOP/s takes, that of bf16 being 1. In fp8, twice as many lower clocks three quarters as far as in bf16,
# as NVIDIA's runs on H100, B200, GB200 and GB300 show.
POWER = {"fp8": 0.375, "mxfp8": 0.375}
OVERLAP_EXPONENT = 3  # higher: the longer of device and host decides more sharply; from Megatron's layers
PEAK_SHARE = 0.8  # share of the peak that a matrix product reaches at best, where nobody has measured it


@dataclass(frozen=True)
class Kernels:
    """Times on a GPU, in seconds. fp8: share of an fp8 product's rate that is left beside the casts of its inputs."""

    gpu: Gpu
    constants: Constants = FITTED_CONSTANTS
    fp8: float = 1.0
    _products: dict[tuple[float, float, float, int, str], float] = field(
        default_factory=dict, compare=False, repr=False
    )
    _rates: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    def matmul(self, m: float, n: float, k: float, batch: int = 1, precision: str = "bf16") -> float:
        """Seconds of a product of [m, k] and [k, n], or `batch` of them at once."""
        key = m, n, k, batch, precision
        if (known := self._products.get(key)) is None:
            work = _tiled(ceil(m), ceil(n), ceil(k), batch, self.gpu.multiprocessors)
            if any(round(size) % VECTOR_ELEMENTS for size in (m, n, k)):
                work *= MISALIGNMENT_FACTOR
            moved = self.passes(2 * batch * (m * k + k * n + m * n))
            known = self._products[key] = max(work / self.rate(precision), moved)
        return known

    def passes(self, moved: float) -> float:
        """Seconds to read and write so many bytes of memory."""
        return moved / self._memory

    def attention(self, flops: float, share: float, precision: str = "bf16") -> float:
        """Seconds of fused attention of so many operations, at a share of the peak."""
        return flops / (self.gpu.peak.get(precision, self.gpu.peak["bf16"]) * share)

    def rate(self, precision: str) -> float:
        """FLOP/s that large matrix products keep up."""
        if precision not in self._rates:
            self._rates[precision] = self._rate(precision)
        return self._rates[precision]

    def _rate(self, precision: str) -> float:
        best = self._best(precision)
        return best * self._clock(best * POWER.get(precision, 1.0)) * (self.fp8 if precision in POWER else 1.0)

    def _best(self, precision: str) -> float:
        """FLOP/s of the best product; where nobody has measured MXFP8, it reaches as much of its peak as fp8.

        Raises InputError for a GPU without MXFP8.
        """
        measured, peak = self.gpu.measured, self.gpu.peak
        if precision == "mxfp8" and precision not in peak:
            rule = f"needs GPUs with MXFP8, and gpu.peak of the cluster's {self.gpu.name} has no mxfp8"
            raise InputError([Problem("train.float8_recipe", rule, "use tensorwise or rowwise", "mx")])
        if precision == "mxfp8" and precision not in measured and "fp8" in measured and "fp8" in peak:
            return measured["fp8"] / peak["fp8"] * peak[precision]
        return measured.get(precision) or PEAK_SHARE * peak.get(precision, peak["bf16"])

    def _clock(self, best: float) -> float:
        """Clocks relative to those of a short product at `best` FLOP/s: at most 1, less for want of power.

        Arithmetic beyond what a watt can feed makes products neither faster nor slower.
        """
        sustained, throttle, per_watt = self.constants.sustained, self.constants.throttle, best / 1e12 / self.gpu.power
        most = sustained / (2 * throttle)  # TFLOP/s a watt at which products are fastest
        falls = sustained - throttle * min(per_watt, most)
        return min(1.0, falls * min(1.0, most / per_watt))

    @cached_property
    def _memory(self) -> float:
        return self.gpu.bandwidth * self.constants.memory


@lru_cache(maxsize=1 << 16)
def _tiled(m: int, n: int, k: int, batch: int, multiprocessors: int) -> float:
    """The operations of a product as if all multiprocessors were busy until its last tile is done."""
    found = []
    for rows, columns, share in TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * batch
        for parts in SPLITS:
            deep = ceil(k / parts) if parts == 1 else max(ceil(k / parts), MIN_SPLIT_ELEMENTS)
            waves = ceil(tiles * parts / multiprocessors)
            depth = ceil(deep / DEPTH) * DEPTH
            each = 2 * rows * columns * depth * (1 + SPLIT_COST * (parts - 1))
            found.append(waves * multiprocessors * each / share)
    return min(found)


def launched(device: float, host: float) -> float:
    """Seconds of kernels that the host launches one by one: those that are shorter than a launch wait for it."""
    return (device**OVERLAP_EXPONENT + host**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)
