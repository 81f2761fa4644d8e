"""Numbers that the time model needs and datasheets do not have: a few for all GPUs, programs and models.

They were fitted once on published runs of other programs. On 1,151 of these the mean error is 5.6 %, the 90th
percentile 11.9 %: `megalite-validate-planner tests/tools/plan/published/runs/*.csv` (docs/planner_evidence.md).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Numbers without a unit, unless one is named.

    sustained, throttle: a matrix product keeps up the best measured rate times `sustained - throttle · (TFLOP/s / W)`,
    with that rate and the datasheet's power: the more arithmetic a watt feeds, the further clocks fall below those of a
    short test, but not so far that more of it would take longer. memory: share of the memory's bandwidth that passes
    over tensors reach. node, network: share of a link's bandwidth that collectives reach. launch: seconds before a
    collective moves anything. hop: of a link's latency, for every rank that a ring passes. overlap: share of the time
    of hidden communication by which it slows the compute beside it. spread: half the width of the interval, relative to
    the estimate.
    """

    sustained: float = 1.05
    throttle: float = 0.235
    memory: float = 0.663
    node: float = 0.965
    network: float = 0.77
    launch: float = 40e-6
    hop: float = 0.508
    overlap: float = 0.14
    spread: float = 0.13

    def beside(self, compute: float, communication: float) -> float:
        """Seconds of both at once: the longer, and a share of the other, which takes its multiprocessors."""
        return max(compute, communication) + self.overlap * min(compute, communication)


FITTED_CONSTANTS = Constants()
