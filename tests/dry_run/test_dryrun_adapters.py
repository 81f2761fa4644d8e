"""Memory and traffic of adapters: what dry runs count is what is predicted."""

from typing import Any

import memory_cases
import pytest
import torch
from four_bits import skip_if_refused
from memory_cases import FEW_TOKENS
from traffic_cases import FULL, MUON, POST, SELECTIVE, TIED, TP, data, pipeline

from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.dry_run.run import dry_run
from megalite.plan.activations import Activations
from megalite.plan.memory.peak import rank_memory
from megalite.plan.memory.walk import HOST_MEMORY
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic

LAYERS = {"model.vocab_size": 64, "model.layers": 2}  # which take more than the head does
DEEP = {**LAYERS, "model.layers": 4}  # what lives for a moment takes less
ADAPTER = {"adapter.rank": 8, "adapter.alpha": 16}
SOME = {"adapter.targets": "[query,value]"}
ROWS = {"adapter.targets": "[attention_output,down]"}
NF4 = {"adapter.base": "nf4"}
DORA = {"adapter.dora": True}
DROPPING = {"adapter.dropout": 0.1}
ENDS = {"adapter.targets": "[embedding,head]", "adapter.rank": 128}
OF_EXPERTS = {"adapter.targets": "[experts]"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": (LAYERS, 0),
    "head takes most": ({}, 0),
    "one rank, zero3": ({**LAYERS, **data("zero3")}, 0),
    "muon, tp, one rank": ({**LAYERS, **TP, **MUON}, 0),
    "some, fp32": ({**LAYERS, **SOME, "train.precision": "fp32"}, 0),
    "tp, zero1": ({**LAYERS, **TP, **data("zero1", dp_shard=2)}, 0),
    "rows, tp": ({**LAYERS, **TP, **ROWS}, 0),
    "zero3, full": ({**LAYERS, **FULL, **data("zero3", dp_shard=2)}, 0),
    "full, tp": ({**LAYERS, **FULL, **TP}, 0),
    "zero2, selective, tp, muon": ({**LAYERS, **TP, **SELECTIVE, **MUON, **data("zero2", dp_shard=2)}, 0),
    "norms after, tied": ({**LAYERS, **POST, **TIED, **data("zero3", dp_shard=2)}, 0),
    "rows, tp, full": ({**LAYERS, **TP, **ROWS, **FULL}, 0),
    "1f1b": ({**LAYERS, **pipeline("1f1b"), **data("zero3", dp_shard=2)}, 0),
    "last stage, tp": ({**LAYERS, **TP, **pipeline("1f1b"), **data("zero2", dp_shard=2)}, 1),
    "last stage has no layer": ({**pipeline("1f1b"), "model.layers": 2, **data("zero3", dp_shard=2)}, 1),
    "zb_h1": ({**LAYERS, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "some, zb_h1": ({**LAYERS, **SOME, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "dropout": ({**LAYERS, **DROPPING, **data("zero3", dp_shard=2)}, 0),
    "dropout, tp, selective": ({**LAYERS, **DROPPING, **TP, **SELECTIVE}, 0),
    "dropout, tp, full": ({**DEEP, **DROPPING, **TP, **FULL}, 0),
    "dropout, latent": ({**LAYERS, **DROPPING, **memory_cases.LATENT}, 0),
    "ends": ({**ENDS, "model.layers": 2}, 0),
    "ends, head takes most": ({**ENDS, "model.layers": 1, "model.vocab_size": 8192}, 0),
    "ends, tp": ({**LAYERS, **ENDS, **TP, **data("zero3", dp_shard=2)}, 0),
    "ends, tp, last stage": ({"model.layers": 2, **ENDS, **TP, **pipeline("1f1b"), **data("zero2", dp_shard=2)}, 1),
    "ends, chunks": ({**memory_cases.CHUNKED, **ENDS}, 0),
    "ends, chunks, tp": ({**memory_cases.CHUNKED, **ENDS, "parallel.tp": 2, "parallel.dp_shard": 2}, 0),
    "latent, tp": ({**LAYERS, **memory_cases.LATENT, **TP}, 0),
    "experts apart": (memory_cases.APART, 0),
    "experts alone, narrow": ({**memory_cases.NARROW_APART, **OF_EXPERTS}, 0),
    "experts alone, full": ({**memory_cases.APART, **OF_EXPERTS, **FULL}, 0),
    # Weights take more than tokens do.
    "few tokens, zero3": ({**DEEP, **FEW_TOKENS, **FULL, **data("zero3", dp_shard=2)}, 0),
    "few tokens, large head": ({**FEW_TOKENS, **data("zero3", dp_shard=2)}, 0),
    "few tokens, zb_h1, tp": ({**LAYERS, **FEW_TOKENS, **TP, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "nf4": ({**LAYERS, **NF4, **FEW_TOKENS}, 0),
    "nf4, tokens take more": ({**LAYERS, **NF4, **TP, **data("zero3", dp_shard=2)}, 0),
    "nf4, tp, full": ({**DEEP, **NF4, **FEW_TOKENS, **TP, **FULL, **data("zero3", dp_shard=2)}, 0),
    "zbv, tp": ({**LAYERS, **TP, **pipeline("zbv"), **data("zero2", dp_shard=2)}, 0),
    "zb_h1, tp": ({**LAYERS, **TP, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "nf4, dropout, muon": ({**LAYERS, **NF4, **FEW_TOKENS, **TP, **DROPPING, **MUON}, 0),
    "nf4, zb_h1": ({**LAYERS, **NF4, **FEW_TOKENS, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "nf4, latent": ({**LAYERS, **NF4, **memory_cases.LATENT}, 0),
    "nf4, shared experts": ({**memory_cases.APART, **memory_cases.SHARED, **NF4, **FEW_TOKENS, **FULL}, 0),
    "dora": ({**LAYERS, **DORA}, 0),
    "dora, tp, zero3": ({**LAYERS, **DORA, **TP, **data("zero3", dp_shard=2)}, 0),
    "dora, rows, tp": ({**LAYERS, **DORA, **ROWS, **TP}, 0),
    "dora, tp, full": ({**LAYERS, **DORA, **TP, **FULL}, 0),
    "dora, some, selective": ({**LAYERS, **DORA, **SOME, **SELECTIVE, **data("zero2", dp_shard=2)}, 0),
    "dora, zb_h1, muon": ({**LAYERS, **DORA, **TP, **MUON, **pipeline("zb_h1"), **data("zero1", dp_shard=2)}, 0),
    "dora, latent, dropout": ({**LAYERS, **DORA, **DROPPING, **memory_cases.LATENT, **TP}, 0),
    "dora, norms after, full": ({**LAYERS, **DORA, **POST, **FULL, **data("zero3", dp_shard=2)}, 0),
    "dora, nf4, few tokens": ({**LAYERS, **DORA, **NF4, **FEW_TOKENS, **TP}, 0),
    "dora, shared experts, full": (
        {**memory_cases.APART, **memory_cases.SHARED, **DORA, "adapter.targets": "[query,gate,down]", **FULL},
        0,
    ),
    "frozen experts": ({**memory_cases.APART, **memory_cases.SHARED, **SOME}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_predicted_is_what_a_dry_run_counts(name: str) -> None:
    overrides, pp = CASES[name]
    config = memory_cases.configured({**ADAPTER, **overrides})
    skip_if_refused(config)
    found, memory, traffic = dry_run(config, pp), rank_memory(config, pp), dict[Any, int]()
    for each in step_traffic(resolve(as_counted(config)), busiest_rank(config, pp), found.micro_batches):
        traffic[each.transfer] = traffic.get(each.transfer, 0) + each.times
    assert found.transfers == traffic
    counted = sum(size for kind, size in found.bytes.items() if kind != HOST_MEMORY)
    if torch.__version__ < (2, 12):  # FSDP2 then keeps what it reduced last where groups after it have no gradients
        assert memory.total < counted * (1 + 5e-3)
        return
    assert memory.total == pytest.approx(counted, rel=5e-3)
    for kind in ("parameters", "optimizer states", HOST_MEMORY):
        assert sum(memory.of(kind).values()) == pytest.approx(found.bytes.get(kind, 0), abs=8192)


def test_products_of_weights_in_four_bits_are_not_computed_in_pieces() -> None:
    """Tensor parallelism gathers at once what they take, as a run does (`parallel.linear`)."""
    large = {**ADAPTER, **LAYERS, **TP, "model.sequence_length": 1 << 18}
    assert Activations(memory_cases.configured(large)).pieces > 1
    assert Activations(memory_cases.configured({**large, **NF4})).pieces == 1
