"""What datasheets do not tell the time model: a few numbers for all GPUs, programs and models.

They were fitted once on published runs. docs/planner.md tells on which, and how well every source is predicted by
constants that were fitted without it.
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
    the estimate; unknown: that of a program of which no profile is known.
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
    unknown: float = 0.35


FITTED = Constants()
BOUNDS = {  # what a fit may not leave: shares of a bandwidth, and of a time
    "sustained": (0.8, 1.2),
    "throttle": (0.0, 0.5),
    "memory": (0.5, 0.95),
    "node": (0.3, 1.0),
    "network": (0.3, 0.95),
    "launch": (1e-6, 1e-4),
    "hop": (0.1, 2.0),
    "overlap": (0.0, 0.5),
}
