"""Memory and traffic of weights that are not trained: what dry runs count is what is predicted."""

from collections.abc import Callable
from typing import Any

import memory_cases
import pytest
import torch
from frozen_roles import BASE, ENDS, INPUTS, SOME, frozen
from traffic_cases import FULL, MUON, NORMED, POST, SELECTIVE, TIED, TP, data, pipeline

from megalite.config.schema import Config
from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.dry_run.run import dry_run
from megalite.plan.memory.held import HOST_MEMORY
from megalite.plan.memory.peak import rank_memory
from megalite.plan.parts.roles import KEY_OF_LATENT, LATENT, QUERY_OF_LATENT, SHARED_KEY, Role
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic

APART = {"abs": 8192, "rel": 5e-4}  # statistics of rows, and counts of updates: less than a matrix of any layer
Case = tuple[frozenset[Role], dict[str, Any], int]  # roles, overrides and the pipeline rank
CASES: dict[str, Case] = {
    "base, one rank, fp32": (BASE, {"train.precision": "fp32"}, 0),
    "base, zero3, tp": (BASE, {**TP, **data("zero3", dp_shard=2)}, 0),
    "base, zb_h1, tp, zero2": (BASE, {**TP, **pipeline("zb_h1"), **data("zero2", dp_shard=2)}, 0),
    "base, last stage, replicas": (BASE, {**pipeline("1f1b"), **data("zero1", dp_shard=2, dp_replicate=2)}, 1),
    "base, optimizer offloaded": (
        BASE,
        {**data("zero3", dp_shard=2), "optim.placement": "host", "optim.update_on": "host"},
        0,
    ),
    "inputs, tp, recompute": (INPUTS, {**TP, **FULL, **data("zero2", dp_shard=2)}, 0),
    "inputs, norms after, full recompute": (INPUTS, {**POST, **FULL, "train.precision": "fp32"}, 0),
    "inputs, norms after, offloaded": (INPUTS, {**POST, "train.offload_activations": True}, 0),
    "inputs, zb_h1, tp": (INPUTS, {**TP, **pipeline("zb_h1"), **data("zero3", dp_shard=2)}, 0),
    "some, tp, muon, zero3": (SOME, {**TP, **MUON, **data("zero3", dp_shard=2)}, 0),
    "some, biases, zb_h1, selective recompute": (
        SOME,
        {**NORMED, **SELECTIVE, **pipeline("zb_h1"), "parallel.data.mode": "zero3"},
        0,
    ),
    "keys and values of latents, tp": (
        frozenset([KEY_OF_LATENT]),
        {**memory_cases.LATENT, **TP, **data("zero3", dp_shard=2)},
        0,
    ),
    "latents, queries, zb_h1": (
        frozenset([LATENT, SHARED_KEY, QUERY_OF_LATENT]),
        {**memory_cases.LATENT, **TP, **pipeline("zb_h1"), "parallel.data.mode": "zero1"},
        0,
    ),
    "ends, tied, tp": (ENDS, {**TIED, **TP, **data("zero3", dp_shard=2)}, 0),
    "ends, tied, last of 2 stages": (ENDS, {**TIED, **pipeline("1f1b"), **data("zero2", dp_shard=2)}, 1),
    "ends, ddp": (ENDS, data("ddp", dp_shard=2), 0),
    "ends, head in chunks": (ENDS, {**memory_cases.CHUNKED, "train.precision": "fp32"}, 0),
}
# Under PyTorch 2.11, FSDP2 keeps what it reduced last where the groups after that have no gradients.
KEEP_REDUCED = ("base, zero3, tp", "base, optimizer offloaded", "ends, tied, tp", "ends, tied, last of 2 stages")


def counted_and_predicted(name: str, configured: Callable[[dict[str, Any]], Config]) -> tuple[Any, ...]:
    those, overrides, pp = CASES[name]
    config = configured(overrides)
    with frozen(those):
        found = dry_run(config, pp)
        traffic: dict[Any, int] = {}
        for each in step_traffic(resolve(as_counted(config)), busiest_rank(config, pp), found.micro_batches):
            traffic[each.transfer] = traffic.get(each.transfer, 0) + each.times
        return found, rank_memory(config, pp), traffic


@pytest.mark.parametrize("name", CASES)
def test_what_is_predicted_is_what_a_dry_run_counts(name: str) -> None:
    found, memory, traffic = counted_and_predicted(name, memory_cases.configured)
    assert found.transfers == traffic
    counted = sum(size for kind, size in found.bytes.items() if kind != HOST_MEMORY)
    if torch.__version__ < (2, 12) and name in KEEP_REDUCED:
        assert memory.total < counted
        return
    assert memory.total == pytest.approx(counted, **APART)
    for kind in ("parameters", "optimizer states", HOST_MEMORY):
        assert sum(memory.of(kind).values()) == pytest.approx(found.bytes.get(kind, 0), **APART)
