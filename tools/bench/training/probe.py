"""The rates of one device that a training step is made of, measured in about a minute.

They show the speed that a training step can reach on this very device: datasheets do not know its power limit, and the
products, the attention and the loss are those of the libraries that are installed.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megalite_tools.bench.training.probe_device import copy, describe, host
from megalite_tools.bench.training.probe_figures import OUT_OF_TIME, CallTimer, Figures, attempt, digits
from megalite_tools.bench.training.probe_layers import attention, cross_entropy, optimizer
from megalite_tools.bench.training.probe_products import gemm

SECONDS = "seconds"  # the key of how long every group took
GROUPS: dict[str, Callable[[Figures], None]] = {  # the loss comes last, because torch.compile may take long
    "device": describe,
    "copy": copy,
    "host": host,
    "gemm": gemm,
    "attention": attention,
    "adamw": optimizer,
    "cross_entropy": cross_entropy,
}


def probe(
    device: torch.device, tiny: bool, note: Callable[[dict[str, Any]], None], seconds: float = 60.0
) -> dict[str, Any]:
    """Measure everything on a CUDA device, or on a CPU, which is a rehearsal.

    tiny: at sizes that take a CPU a few seconds, and mean nothing. note: is given everything so far after every group.
    seconds: no figure starts after so many.

    Returns for every group its figures by name, and in `seconds` how long each took. A figure has milliseconds (`ms`,
    with the 10th and 90th percentile) and a rate in `tflops`, `bytes_per_s` or `ms_per_billion`; `error` if it failed;
    `not_measured` if it did not run. A group may have these two itself.
    """
    start = time.monotonic()
    found: dict[str, Any] = {SECONDS: {}}
    clock = CallTimer(device)
    torch.manual_seed(0)
    for name, group in GROUPS.items():
        began = time.monotonic()
        figures = Figures(clock, tiny, start + seconds)
        found[name] = figures.found
        if began >= figures.deadline:
            found[name] |= OUT_OF_TIME
        else:
            found[name] |= attempt(partial(group, figures)) or {}
            attempt(clock.free)
        found[SECONDS][name] = digits(time.monotonic() - began)
        note(found)
    return found
