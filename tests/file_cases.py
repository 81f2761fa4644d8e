"""Jobs whose states pass through small slots, beside the same jobs with states on the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from toy_jobs import CPU, MODEL, Parts, advance, config_of, make, parts

from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Experts
from megalite.config.parallel_schema import DataMode
from megalite.config.schema import Config
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
        expected = trained(config)
        for placement in ("host", folder):
            found += [f"{name}: {placement}: {what}" for what in unlike(trained(placed(config, placement)), expected)]
    return found


Trained = tuple[Sequence[float], float, Parts]  # losses, the norm of the weights, and weights with states


def trained(config: Config) -> Trained | None:
    mesh = build_mesh(config, CPU)
    if mesh is None:
        return None
    with small_slots():
        job = build(resolve(config), mesh)
    return advance(job, 0, STEPS), job.gradients.parameter_norm().item(), parts(job)


def unlike(one: Trained | None, other: Trained | None) -> list[str]:
    """The losses, norm and tensors of two trainings that differ in any bit; none on a rank that takes no part."""
    if one is None or other is None:
        return [] if one is other else ["one has trained"]
    wrong = [name for name, part in other[2].items() if not torch.equal(one[2][name].values, part.values)]
    return [*wrong, *(what for what, at in (("losses", 0), ("norm", 1)) if one[at] != other[at])]


def in_files(config: Config, folder: object) -> Any:
    """A job of this process whose states are in files."""
    with small_slots():
        return make(placed(config, str(folder)))
