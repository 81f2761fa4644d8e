"""Layouts whose traffic is predicted and counted: every axis, data mode, schedule, method and feature."""

from typing import Any

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config

SIZES = {"layers": 2, "width": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab_size": 120, "sequence_length": 64}
Overrides = dict[str, Any]


def data(mode: str, **more: int) -> Overrides:
    return {"parallel.data.mode": mode, **{f"parallel.{axis}": size for axis, size in more.items()}}


def pipeline(schedule: str, pp: int = 2, layers: int = 4) -> Overrides:
    return {"parallel.pipeline.schedule": schedule, "parallel.pp": pp, "model.layers": layers}


def context(method: str, cp: int, **model: Any) -> Overrides:
    features = {f"model.{key}": value for key, value in model.items()}
    return {"parallel.context.method": method, "parallel.cp": cp, **features}


FP32: Overrides = {"train.precision": "fp32"}
FP64: Overrides = {"train.precision": "fp64"}
BLOCKS: Overrides = {
    "train.precision": "fp8",
    "train.float8_recipe": "mx",
    "model.kv_heads": 8,
    "model.ffn": 128,
    "model.sequence_length": 128,
}
NARROW: Overrides = {"parallel.data.reduce_precision": "bf16"}
TP: Overrides = {"parallel.tp": 2}
PADDED: Overrides = {"model.vocab_size": 121}  # 64 rows on each of two ranks
MTP: Overrides = {"model.mtp.depth": 2}
TIED: Overrides = {"model.tie_embeddings": True}
NORMED: Overrides = {"model.qk_norm": True, "model.qkv_bias": True}
POST: Overrides = {"model.norm": "post", "model.qk_norm": True, "model.qk_norm_width": "all"}
FULL: Overrides = {"train.recompute": "full"}
SELECTIVE: Overrides = {"train.recompute": "selective"}
MUON: Overrides = {"optim.name": "muon"}
WINDOW: Overrides = {"model.attention.window": 20}
LATENT: Overrides = {
    "model.kv_heads": 8,
    "model.head_width": 12,
    "model.rotary_width": 4,
    "model.attention.latent": "{query_rank: 24, key_rank: 16, value_width: 8}",
}
KEYS: Overrides = {**LATENT, "model.attention.latent": "{key_rank: 16, value_width: 8}"}
EXPERTS: Overrides = {"model.experts.count": 6, "model.experts.active": 2, "model.experts.width": 24}
SHARED: Overrides = {"model.experts.shared_width": 32, "model.experts.shared_gate": True}
BALANCED: Overrides = {**EXPERTS, "model.experts.balance_loss": 0.1}
APART: Overrides = {"parallel.ep": 2, "model.experts.count": 8}  # which divides the tokens of a micro-batch
# FSDP2 shards their width or the stream's: ranks with the same experts do not divide these evenly.
ONE: Overrides = {"parallel.ep": 2, "model.experts.count": 2}
THREE: Overrides = {"parallel.ep": 2, "model.experts.width": 25}
WORST_CASE: Overrides = {"parallel.experts.buffers": "worst_case"}
GPT_OSS: Overrides = {
    "model.qkv_bias": True,
    "model.out_bias": True,
    "model.attention.sinks": True,
    "model.experts.biases": True,
    "model.experts.gate": "clamped",
    "model.attention.window": 20,
    "model.attention.full_every": 2,
}
DOCUMENTS: Overrides = {"data.mask_documents": True, "data.reset_positions": True, "data.end_of_document": 1}

CASES: dict[str, tuple[Overrides, dict[str, int]]] = {  # name -> overrides, and the coordinates of the rank
    "one rank": ({}, {}),
    "tp without fsdp": ({**TP, **FP32, **NORMED}, {"tp": 1}),
    "tp, fp64": ({"parallel.tp": 4, **FP64}, {}),
    "tp, zero3, uneven shards": ({**TP, **data("zero3", dp_shard=3)}, {"dp_shard": 2}),
    "tp, padded vocabulary, tied, first stage, uneven shards": (
        {**TP, **PADDED, **TIED, **pipeline("1f1b"), **data("zero2", dp_shard=3)},
        {"dp_shard": 2, "tp": 1},
    ),
    "tp, padded vocabulary, zero3, head in chunks": (
        {**TP, **PADDED, **data("zero3", dp_shard=2), "batch.micro": 80, "batch.global": 320},
        {"tp": 1},
    ),
    "tp, zero2, norms and biases": ({**TP, **NORMED, **data("zero2", dp_shard=3)}, {}),
    "fp8 by blocks, tp": ({**BLOCKS, **TP, **data("zero1", dp_shard=2)}, {"tp": 1}),
    "fp8 by blocks, tp, ring, zb_h1, full recompute": (
        {**BLOCKS, **TP, **FULL, **pipeline("zb_h1"), **context("ring", 2), **data("zero3", dp_shard=2)},
        {"pp": 1},
    ),
    "fp8 by blocks, MLP in bf16, tp": ({**BLOCKS, **TP, "model.ffn": 96}, {}),
    "zero1, replicas": (data("zero1", dp_shard=2, dp_replicate=2), {"dp_replicate": 1}),
    "zero2, replicas, bf16 reduction, tp": ({**NARROW, **TP, **data("zero2", dp_shard=2, dp_replicate=2)}, {}),
    "zero3, replicas, fp32": ({**FP32, **data("zero3", dp_shard=2, dp_replicate=3)}, {}),
    "replicas alone": (data("zero3", dp_shard=1, dp_replicate=2), {}),
    "ddp, tp": ({**TP, **data("ddp", dp_shard=2)}, {}),
    "ddp, fp32, cp": ({**FP32, **data("ddp", dp_shard=2, cp=2)}, {}),
    "selective recompute, tp": ({**SELECTIVE, **TP, **NORMED}, {}),
    "full recompute, tp": ({**FULL, **TP, **data("zero3", dp_shard=2)}, {}),
    "full recompute of every second layer, tp": ({**FULL, "train.recompute_every": 2, **TP, "model.layers": 3}, {}),
    "norms after, tp": ({**POST, **TP, **FP32}, {}),
    "norms after, full recompute, tp, cp": ({**POST, **FULL, **TP, **context("ring", 2)}, {}),
    "norms before and after, full recompute, tp": (
        {**FULL, **TP, "model.norm": "both", "model.norm_gain": "one_plus_weight", "model.activation": "gelu"},
        {},
    ),
    "norms after, selective recompute, tp": ({**POST, **SELECTIVE, **TP, **data("zero1", dp_shard=2)}, {}),
    "offloaded": ({"train.offload_activations": True, "optim.placement": "host", **FULL, **TP}, {}),
    "tied, zero3": ({**TIED, **data("zero3", dp_shard=2)}, {}),
    "tied, first stage, uneven shards": ({**TIED, **pipeline("1f1b"), **data("zero2", dp_shard=7)}, {"dp_shard": 6}),
    "tied, last stage, tp": ({**TIED, **TP, **pipeline("1f1b"), **data("zero3", dp_shard=2)}, {"pp": 1}),
    "tied, between the ends": ({**TIED, **pipeline("1f1b", pp=3)}, {"pp": 1}),
    "mtp, tp, full recompute": ({**MTP, **TP, **FULL}, {}),
    "mtp, experts, last stage, zero3, zb_h1, full recompute": (
        {**MTP, **EXPERTS, **APART, **FULL, **pipeline("zb_h1"), **data("zero3", dp_shard=2)},
        {"pp": 1},
    ),
    "mtp, first stage, zero2, cp": ({**MTP, **pipeline("1f1b"), **context("ring", 2), **data("zero2")}, {}),
    "mtp, tied, last stage, documents": ({**MTP, **TIED, **DOCUMENTS, **pipeline("interleaved_1f1b")}, {"pp": 1}),
    "ring, tp": ({**context("ring", 2), **TP}, {"cp": 1}),
    "ring, window": ({**context("ring", 4), **WINDOW}, {"cp": 1}),
    "ring, windows of some layers, full recompute": (
        {**context("ring", 2), **WINDOW, **FULL, "model.attention.full_every": 2},
        {},
    ),
    "ring, documents, capped": ({**context("ring", 2), **DOCUMENTS, "model.attention.softcap": 30.0}, {}),
    "ring, window of one token": ({**context("ring", 2), "model.attention.window": 1}, {}),
    "all_gather, fp64": ({**context("all_gather", 4), **FP64}, {"cp": 3}),
    "all_gather, window, dp": ({**context("all_gather", 2), **WINDOW, **data("zero2", dp_shard=2)}, {"cp": 1}),
    "ulysses, tp": ({**context("ulysses", 2), **TP}, {}),
    "ulysses, copied heads, window, recompute": ({**context("ulysses", 8, kv_heads=2), **WINDOW, **FULL}, {"cp": 5}),
    "gpipe": (pipeline("gpipe"), {"pp": 1}),
    "1f1b, middle of 3": ({**pipeline("1f1b", pp=3), **data("zero3", dp_shard=2)}, {"pp": 1}),
    "interleaved_1f1b, zero3": ({**pipeline("interleaved_1f1b"), **data("zero3", dp_shard=2)}, {}),
    "interleaved_1f1b, zero1, tied": ({**pipeline("interleaved_1f1b"), **TIED, **data("zero1", dp_shard=2)}, {"pp": 1}),
    "zb_h1, tp, zero3": ({**pipeline("zb_h1"), **TP, **NORMED, **data("zero3", dp_shard=2)}, {}),
    "zb_h1, tied, last stage": ({**pipeline("zb_h1"), **TIED, **data("zero3", dp_shard=2)}, {"pp": 1}),
    "zb_h2, full recompute, replicas": (
        {**pipeline("zb_h2"), **FULL, **data("zero2", dp_shard=2, dp_replicate=2)},
        {"pp": 1},
    ),
    "zbv, tied, zero2": ({**pipeline("zbv"), **TIED, **data("zero2", dp_shard=2)}, {}),
    "dualpipev, zero3, tp": ({**pipeline("dualpipev"), **TP, **data("zero3", dp_shard=2)}, {"pp": 1}),
    "muon, tp, uneven shards": ({**MUON, **TP, **data("zero3", dp_shard=3)}, {"dp_shard": 2, "tp": 1}),
    "muon, shards of a stage": ({**MUON, **pipeline("1f1b"), **data("zero2", dp_shard=2)}, {"pp": 1, "dp_shard": 1}),
    "muon, all axes of a stage": (
        {**MUON, **pipeline("1f1b"), **TP, **data("zero1", dp_shard=2, dp_replicate=2)},
        {"dp_replicate": 1, "tp": 1},
    ),
    "muon, ddp, fp64": ({**MUON, **FP64, **data("ddp", dp_shard=2)}, {"dp_shard": 1}),
    "head in chunks, tp": ({**TP, "batch.micro": 80, "batch.global": 160}, {}),
    "experts, ring, no balance loss": ({**EXPERTS, **context("ring", 2), **data("zero3", dp_shard=2)}, {}),
    "experts, ring, balance loss": ({**BALANCED, **context("ring", 2), "batch.micro": 2, "batch.global": 8}, {"cp": 1}),
    "experts, balance loss without context parallelism": ({**BALANCED, **data("zero2", dp_shard=2)}, {}),
    "experts of every second layer, ulysses, balance loss, full recompute, dualpipev": (
        {**BALANCED, "model.experts.every": 2, **context("ulysses", 2), **FULL, **pipeline("dualpipev")},
        {"pp": 1},
    ),
    "experts, muon, uneven shards, zb_h1, selective recompute": (
        {**EXPERTS, **MUON, **SELECTIVE, **pipeline("zb_h1"), **data("zero3", dp_shard=4)},
        {"dp_shard": 3},
    ),
    "experts apart": ({**EXPERTS, **APART, **data("zero3", dp_shard=4)}, {"dp_shard": 3}),
    "experts apart, zero2, more micro-batches": (
        {**EXPERTS, **APART, **data("zero2", dp_shard=4), "batch.global": 12},
        {},
    ),
    "experts apart, ddp, muon": ({**EXPERTS, **APART, **MUON, **data("ddp", dp_shard=4)}, {}),
    "experts apart, full recompute, replicas, a shared one": (
        {**BALANCED, **SHARED, **APART, **FULL, **data("zero3", dp_shard=2, dp_replicate=2)},
        {"dp_replicate": 1},
    ),
    "experts apart, tp, muon, balance loss, a shared one": (
        {**BALANCED, **SHARED, **APART, **TP, **MUON, **data("zero1", dp_shard=2), "parallel.ep": 4},
        {"tp": 1},
    ),
    "worst-case buffers": ({**EXPERTS, **APART, **WORST_CASE, **data("zero3", dp_shard=4)}, {"dp_shard": 1}),
    "worst-case buffers, tp, full recompute, balance loss, a shared one": (
        {**BALANCED, **SHARED, **APART, **TP, **WORST_CASE, **FULL, **data("zero1", dp_shard=2), "parallel.ep": 4},
        {"tp": 1},
    ),
    "worst-case buffers, ring, zb_h1, selective recompute": (
        {**EXPERTS, **APART, **WORST_CASE, **SELECTIVE, **context("ring", 2), **pipeline("zb_h1")},
        {"pp": 1},
    ),
    "worst-case buffers, full recompute, norms after": (
        {**EXPERTS, **APART, **WORST_CASE, **FULL, **POST, **data("zero2", dp_shard=4)},
        {},
    ),
    "experts apart, ring, zbv": (
        {**EXPERTS, **APART, **context("ring", 2), **data("zero2", dp_shard=2), **pipeline("zbv")},
        {"cp": 1, "pp": 1},
    ),
    "experts apart, zb_h1, zero3, tp, a shared one": (
        {**EXPERTS, **SHARED, **TP, **APART, **data("zero3", dp_shard=4), **pipeline("zb_h1")},
        {},
    ),
    "experts apart, one of a rank, zero3, muon, replicas": (
        {**EXPERTS, **ONE, **MUON, **data("zero3", dp_shard=8, dp_replicate=2)},
        {"dp_shard": 5},
    ),
    "gpt-oss, apart, three of a rank, zb_h1, zero2": (
        {**EXPERTS, **GPT_OSS, **THREE, **data("zero2", dp_shard=4), **pipeline("zb_h1")},
        {"pp": 1, "dp_shard": 3},
    ),
    "gpt-oss, apart, ring, tp": (
        {**EXPERTS, **APART, **GPT_OSS, **TP, **context("ring", 2), **data("zero2", dp_shard=2)},
        {"tp": 1},
    ),
    "latent, tp, zero3": ({**LATENT, **TP, **data("zero3", dp_shard=2)}, {"tp": 1}),
    "latent of keys, tp, full recompute": ({**KEYS, **TP, **FULL}, {}),
    "latent, ring, tp, selective recompute, fp32": (
        {**LATENT, **context("ring", 2), **TP, **SELECTIVE, **FP32},
        {"cp": 1},
    ),
    "latent, all_gather": ({**LATENT, **context("all_gather", 4)}, {"cp": 3}),
    "latent, ulysses, tp, zb_h1": ({**LATENT, **context("ulysses", 2), **TP, **pipeline("zb_h1")}, {"pp": 1}),
    "latent of keys, ring, window": ({**KEYS, **context("ring", 4), **WINDOW}, {"cp": 1}),
    "latent, tp, muon": ({**LATENT, **TP, **MUON, **data("zero2", dp_shard=2)}, {}),
    "all five axes": (
        {
            **pipeline("interleaved_1f1b"),
            **TP,
            **context("ring", 2),
            **data("zero3", dp_shard=2, dp_replicate=2),
            **POST,
            **TIED,
            **MUON,
            **WINDOW,
        },
        {"pp": 1, "dp_replicate": 1, "cp": 1, "tp": 1},
    ),
}


def configured(overrides: Overrides, steps: int = 2) -> Config:
    """A small model, changed by `overrides`; a step has `steps` micro-batches for every stage, unless they say else."""
    degrees = {key: overrides.get(f"parallel.{key}", 1) for key in ("pp", "dp_shard", "dp_replicate")}
    batch = steps * degrees["pp"] * degrees["dp_shard"] * degrees["dp_replicate"]
    values = {f"model.{key}": value for key, value in SIZES.items()}
    values |= {"parallel.dp_shard": 1, "batch.global": batch, **overrides}
    return check(load([], [f"{key}={value}" for key, value in values.items()]))
