"""Jobs whose states pass through small slots, beside the same jobs with states on the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from toy_jobs import CPU, MODEL, Parts, advance, config_of, make, parts

from megalite.config.layout import Layout
from megalite.config.schema import Adapter, Config, DataMode, Experts
from megalite.optim import build as optim_build
from megalite.plan.resolved import resolve
from megalite.plan.state_streams import BLOCK, padded
from megalite.train.build import build, build_mesh

LARGER = replace(MODEL, width=32, ffn=80, vocab_size=96)  # moments of the embedding take several buckets
STEPS = 3


def placed(config: Config, placement: str, **optim: Any) -> Config:
    return replace(config, optim=replace(config.optim, placement=placement, **optim))


def case(layout: Layout, mode: DataMode = "zero3", optimizer: str = "adamw", **changes: Any) -> Config:
    config = config_of(layout, changes.pop("model", LARGER))
    data = replace(config.parallel.data, mode=mode)
    named = replace(config, parallel=replace(config.parallel, data=data), optim=replace(config.optim, name=optimizer))
    return replace(named, **changes)


SPARSE = replace(LARGER, experts=Experts(4, 2, 12))
CASES = {
    "adamw, ddp": case(Layout(dp_replicate=2), "ddp"),
    "adamw, zero1": case(Layout(dp_shard=4), "zero1"),
    "adamw, zero2": case(Layout(dp_shard=2, cp=2), "zero2"),
    "adamw, zero3": case(Layout(dp_shard=4)),
    "adamw, tp": case(Layout(tp=2, dp_shard=2)),
    "adamw, pp": case(Layout(pp=2, dp_shard=2), "zero1"),
    "adamw, experts": case(Layout(dp_shard=4, ep=2), model=SPARSE),
    "muon, zero1": case(Layout(dp_shard=2, tp=2), "zero1", "muon"),
    "muon, zero3": case(Layout(dp_shard=4), "zero3", "muon"),
    "muon, pp": case(Layout(pp=2, dp_replicate=2), "ddp", "muon"),
    "muon, experts": case(Layout(dp_shard=4, ep=2), "zero3", "muon", model=SPARSE),
    "adapters": case(Layout(tp=2, dp_shard=2), adapter=Adapter(rank=4)),
    "adapters, muon": case(Layout(pp=2, dp_shard=2), "zero2", "muon", adapter=Adapter(rank=4)),
}


@contextmanager
def small_slots() -> Iterator[None]:
    """States pass through slots of a few blocks."""
    with patch.object(optim_build, "slot_bytes", lambda largest: max(4 * BLOCK, padded(largest))):
        yield


def differences(folder: str) -> list[str]:
    """Cases and places in which losses or any bit of weights and states differ from those on the device."""
    found = []
    for name, config in CASES.items():
        expected = _trained(config)
        for placement in ("host", folder):
            if expected is not None and not _same(_trained(placed(config, placement)), expected):
                found.append(f"{name}: {placement}")
    return found


Trained = tuple[Sequence[float], Parts]


def _trained(config: Config) -> Trained | None:
    mesh = build_mesh(config, CPU)
    if mesh is None:
        return None
    with small_slots():
        job = build(resolve(config), mesh)
    return advance(job, 0, STEPS), parts(job)


def _same(one: Trained | None, other: Trained) -> bool:
    assert one is not None
    return one[0] == other[0] and all(torch.equal(one[1][name].values, other[1][name].values) for name in other[1])


def in_files(config: Config, folder: object) -> Any:
    """A job of this process whose states are in files."""
    with small_slots():
        return make(placed(config, str(folder)))
