"""Configurations whose memory is predicted and counted: every precision, data mode, schedule and way to recompute."""

from typing import Any

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config

SIZES = {"layers": 2, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 640, "vocab_size": 4096, "sequence_length": 512}
Overrides = dict[str, Any]
PIPELINE: Overrides = {"model.layers": 4, "parallel.pp": 2, "batch.global": 8}
FUSED: Overrides = {"parallel.tensor.overlap": "symmetric"}
ALL_GATHER: Overrides = {"parallel.context.method": "all_gather"}
DOCUMENTS: Overrides = {"data.mask_documents": True, "data.reset_positions": True, "data.end_of_document": 1}
ULYSSES: Overrides = {"parallel.context.method": "ulysses"}
SHARDED: Overrides = {"parallel.dp_shard": 2}
HYBRID: Overrides = {"parallel.dp_replicate": 2, **SHARDED}
ATTENTION: Overrides = {"model.head_width": 64, "model.sequence_length": 2048}  # heads twice as wide as the stream
WINDOW: Overrides = {"model.attention.window": 128}
CAPPED: Overrides = {"model.attention.softcap": 30.0}
POST: Overrides = {"model.norm": "post", "model.qk_norm": True, "model.qk_norm_width": "all"}
TIED: Overrides = {"model.tie_embeddings": True}
GEMMA: Overrides = {
    "model.norm": "both",
    "model.norm_gain": "one_plus_weight",
    "model.activation": "gelu",
    "model.embedding_multiplier": 16.0,
    "model.logits_softcap": 30.0,
    "model.attention.scale": 0.1,
    "model.attention.window": 128,
    "model.attention.full_every": 2,
    "model.attention.window_rope_theta": 1000.0,
    **TIED,
}
MTP: Overrides = {"model.mtp.depth": 1}
NOPE: Overrides = {"model.attention.nope_every": 1}
COMPLETEP: Overrides = {
    "model.parametrization": "completep",
    "model.base": "{width: 64, layers: 1, head_width: 8}",
    "model.embedding_multiplier": 3,
}
STREAMED: Overrides = {"parallel.placement.parameters": "host", "optim.placement": "host"}
ON_HOST: Overrides = {**STREAMED, "optim.update_on": "host"}
WIDE: Overrides = {**TIED, "model.width": 1024, "model.ffn": 512, "model.sequence_length": 256}
ZERO2: Overrides = {"parallel.data.mode": "zero2"}
ZERO3: Overrides = {"parallel.data.mode": "zero3"}
FEW_TOKENS: Overrides = {"model.sequence_length": 64}  # weights take more
NARROW: Overrides = {"parallel.data.reduce_precision": "bf16"}
FP8: Overrides = {"train.precision": "fp8"}
ROWWISE: Overrides = {"train.float8_recipe": "rowwise"}
MX: Overrides = {"train.float8_recipe": "mx"}
NORMED: Overrides = {"model.qk_norm": True, "train.recompute": "selective", "model.sequence_length": 4096}

KEYS: Overrides = {  # latents of keys and values alone; attention takes more than the head and the feed-forward
    "model.kv_heads": 8,
    "model.head_width": 96,
    "model.rotary_width": 32,
    "model.ffn": 64,
    "model.vocab_size": 256,
    "model.attention.latent": "{key_rank: 128, value_width: 64}",
}
LATENT: Overrides = {**KEYS, "model.attention.latent": "{query_rank: 192, key_rank: 128, value_width: 64}"}
EXPERTS: Overrides = {"model.experts.count": 8, "model.experts.active": 3, "model.experts.width": 1024}
# Tokens at their experts take more than weights do.
NARROW_EXPERTS: Overrides = {
    "model.experts.count": 16,
    "model.experts.active": 8,
    "model.experts.width": 32,
    "model.vocab_size": 64,
    "batch.micro": 4,
    "batch.global": 32,
}
SHARED: Overrides = {"model.experts.shared_width": 1536, "model.experts.shared_gate": True}
GPT_OSS: Overrides = {
    "model.qkv_bias": True,
    "model.out_bias": True,
    "model.attention.sinks": True,
    "model.experts.biases": True,
    "model.experts.gate": "clamped",
}
BALANCED: Overrides = {"model.experts.balance_loss": 0.01}

CHUNKED: Overrides = {"batch.micro": 24, "batch.global": 48, "model.vocab_size": 8192, "model.ffn": 256}

APART: Overrides = {
    "model.experts.count": 8,
    "model.experts.active": 3,
    "model.experts.width": 1024,
    "parallel.dp_shard": 4,
    "parallel.ep": 2,
}
# Ranks with the same experts do not divide these evenly: FSDP2 shards their width.
THREE_APART: Overrides = {**APART, "model.experts.count": 6}
SIX: Overrides = {**EXPERTS, "model.experts.count": 6, "parallel.dp_shard": 4}
NARROW_APART: Overrides = {**NARROW_EXPERTS, "parallel.dp_shard": 4, "parallel.ep": 2}
WORST_CASE: Overrides = {"parallel.experts.buffers": "worst_case"}
FIXED: Overrides = {**APART, **WORST_CASE}
NARROW_FIXED: Overrides = {**NARROW_APART, **WORST_CASE}
PAIRED: Overrides = {  # passes of two stages take turns
    **PIPELINE,
    "model.layers": 8,
    "batch.global": 32,
    "parallel.pipeline.schedule": "dualpipev",
}
CASES: dict[str, tuple[Overrides, int]] = {  # name -> overrides and the pipeline rank
    "fp32": ({"train.precision": "fp32"}, 0),
    "fp64, tp": ({"train.precision": "fp64", "parallel.tp": 2}, 0),
    "bf16, micro-batch of 4": ({"batch.micro": 4, "batch.global": 8}, 0),
    "query and key norms, biases": ({"model.qk_norm": True, "model.qkv_bias": True, **SHARDED}, 0),
    "tied": ({"model.tie_embeddings": True, **SHARDED}, 0),
    "tied, wide": (WIDE, 0),
    "copies, wide": ({**WIDE, "model.tie_embeddings": False, "parallel.data.mode": "ddp"}, 0),
    "tied, wide, zero1, cp": ({**WIDE, "parallel.cp": 2, "parallel.data.mode": "zero1"}, 0),
    "tied, wide, zero2, fp32": ({**WIDE, **SHARDED, "parallel.data.mode": "zero2", "train.precision": "fp32"}, 0),
    "tied, wide, ddp, fp64, recompute full": (
        {**WIDE, **SHARDED, "parallel.data.mode": "ddp", "train.precision": "fp64", "train.recompute": "full"},
        0,
    ),
    "tied, first of 2 stages": ({"model.tie_embeddings": True, **SHARDED, **PIPELINE}, 0),
    "tied, last of 2 stages": ({"model.tie_embeddings": True, **SHARDED, **PIPELINE}, 1),
    "ddp": ({"parallel.data.mode": "ddp", **SHARDED}, 0),
    "zero1": ({"parallel.data.mode": "zero1", **SHARDED}, 0),
    "zero2, replicas": ({"parallel.data.mode": "zero2", "parallel.dp_replicate": 2, **SHARDED}, 0),
    "zero2, bf16 reduction": ({"parallel.data.mode": "zero2", "parallel.data.reduce_precision": "bf16", **SHARDED}, 0),
    "zero3, tp": ({"parallel.tp": 4, **SHARDED}, 0),
    "zero3, tp, fused": ({"parallel.tp": 4, **FUSED, **SHARDED}, 0),
    "copies, tp, fused, split backward": (
        {"parallel.tp": 2, **FUSED, **PIPELINE, "parallel.pipeline.schedule": "zb_h1", "batch.micro": 4},
        0,
    ),
    "zero3, tp, padded vocabulary": ({"parallel.tp": 4, "model.vocab_size": 4001, **SHARDED}, 0),
    "tied, tp, padded vocabulary, fp32, last of 2 stages": (
        {**TIED, "parallel.tp": 4, "model.vocab_size": 4001, "train.precision": "fp32", **PIPELINE},
        1,
    ),
    "recompute full": ({"train.recompute": "full", "batch.micro": 4, **SHARDED}, 0),
    "recompute selective": ({"train.recompute": "selective", "batch.micro": 4, "model.qk_norm": True}, 0),
    "recompute every second layer": ({"train.recompute": "full", "train.recompute_every": 2, "batch.micro": 4}, 0),
    "recompute within a budget": ({"train.recompute": "budget", "train.recompute_budget": 0.02, "batch.micro": 4}, 0),
    "completep": ({**COMPLETEP, "train.recompute": "selective", **SHARDED}, 0),
    "completep, post norms, tied, last of 2 stages": ({**COMPLETEP, **POST, **TIED, **PIPELINE}, 1),
    "activations offloaded": ({"train.offload_activations": True, "batch.micro": 4}, 0),
    "offloaded and recomputed": ({"train.offload_activations": True, "train.recompute": "full", **PIPELINE}, 1),
    "optimizer offloaded": ({"optim.placement": "host", **SHARDED}, 0),
    "optimizer in files": ({"optim.placement": "./files", **SHARDED}, 0),
    "muon": ({"optim.name": "muon", "parallel.tp": 2, **SHARDED}, 0),
    "muon, optimizer in files": (
        {"optim.name": "muon", "optim.placement": "./files", "checkpoint.async": False, **PIPELINE},
        1,
    ),
    "muon, ddp": ({"optim.name": "muon", "parallel.data.mode": "ddp", "train.precision": "fp64", **SHARDED}, 0),
    "muon, optimizer offloaded": ({"optim.name": "muon", "optim.placement": "host", "parallel.tp": 2, **SHARDED}, 0),
    "muon, optimizer offloaded, update most of all": (
        {"optim.name": "muon", "optim.placement": "host", "model.vocab_size": 64, "batch.global": 1},
        0,
    ),
    "parameters on the host, streamed": ({**STREAMED, **FEW_TOKENS}, 0),
    "parameters on the host": ({**ON_HOST, **FEW_TOKENS, "model.layers": 4}, 0),
    "parameters on the host, fp32": ({**ON_HOST, **FEW_TOKENS, "train.precision": "fp32"}, 0),
    "parameters on the host, zero1": ({**ON_HOST, **SHARDED, **FEW_TOKENS, "parallel.data.mode": "zero1"}, 0),
    "parameters on the host, zero2, last of 2 stages": ({**ON_HOST, **SHARDED, **ZERO2, **PIPELINE, **FEW_TOKENS}, 1),
    "parameters on the host, zero3, tied": ({**ON_HOST, **SHARDED, **TIED, **FEW_TOKENS}, 0),
    "parameters on the host, experts": ({**ON_HOST, **EXPERTS}, 0),
    "parameters on the host, experts apart": ({**ON_HOST, **EXPERTS, **SHARDED, "parallel.ep": 2}, 0),
    "parameters on the host, states in files": ({**STREAMED, "optim.placement": "./files", **SHARDED}, 0),
    "parameters on the host, muon": ({**STREAMED, "optim.name": "muon", "parallel.tp": 2, **SHARDED}, 0),
    "base on the host": ({"parallel.placement.parameters": "host", "adapter.rank": 8, **FEW_TOKENS}, 0),
    "base on the host, zero3": (
        {"parallel.placement.parameters": "host", "adapter.rank": 8, **SHARDED, **FEW_TOKENS},
        0,
    ),
    "base on the host, zero1": (
        {
            "parallel.placement.parameters": "host",
            "adapter.rank": 8,
            **SHARDED,
            **FEW_TOKENS,
            "parallel.data.mode": "zero1",
        },
        0,
    ),
    "base on the host, four bits, last of 2 stages": (
        {"parallel.placement.parameters": "host", "adapter.rank": 8, "adapter.base": "nf4", **FEW_TOKENS, **PIPELINE},
        1,
    ),
    "attention most of all": (ATTENTION, 0),
    "attention most of all, documents": ({**ATTENTION, **DOCUMENTS}, 0),
    "attention most of all, ring": ({**ATTENTION, "parallel.cp": 4}, 0),
    "attention most of all, split backward": ({**ATTENTION, **PIPELINE, "parallel.pipeline.schedule": "zb_h1"}, 0),
    "attention most of all, norms of heads, split backward": (
        {**ATTENTION, **PIPELINE, "parallel.pipeline.schedule": "zb_h1", "model.qk_norm": True},
        0,
    ),
    "fp8, zero1, tp": ({**FP8, **SHARDED, "parallel.tp": 2, "parallel.data.mode": "zero1"}, 0),
    "fp8, recompute full": ({**FP8, **SHARDED, "train.recompute": "full", "batch.micro": 4}, 0),
    "fp8, selective, split backward": (
        {**FP8, **PIPELINE, "train.recompute": "selective", "parallel.pipeline.schedule": "zb_h1"},
        0,
    ),
    "fp8 by rows": ({**FP8, **ROWWISE}, 0),
    "fp8 by rows, zero1, tp": ({**FP8, **ROWWISE, **SHARDED, "parallel.tp": 2, "parallel.data.mode": "zero1"}, 0),
    "fp8 by rows, MLP most of all": (
        {**FP8, **ROWWISE, "model.ffn": 8192, "model.vocab_size": 64, "batch.micro": 4},
        0,
    ),
    "fp8 by blocks": ({**FP8, **MX}, 0),
    "fp8 by blocks, zero1, tp": ({**FP8, **MX, **SHARDED, "parallel.tp": 2, "parallel.data.mode": "zero1"}, 0),
    "fp8 by blocks, MLP most of all": (
        {**FP8, **MX, "model.ffn": 8192, "model.vocab_size": 64, "batch.micro": 4},
        0,
    ),
    "fp8, post norms, MLP in bf16": ({**FP8, **POST, "model.ffn": 648, "model.vocab_size": 64}, 0),
    "window": ({**ATTENTION, **WINDOW}, 0),
    "window, documents, fp32": ({**ATTENTION, **WINDOW, **DOCUMENTS, "train.precision": "fp32"}, 0),
    "alternating windows, recompute": (
        {
            "model.attention.window": 256,
            "model.attention.full_every": 2,
            "model.layers": 4,
            "train.recompute": "selective",
        },
        0,
    ),
    "window, ring": ({**ATTENTION, **WINDOW, "parallel.cp": 4}, 0),
    "long window, all_gather": ({**ATTENTION, "model.attention.window": 1500, "parallel.cp": 4, **ALL_GATHER}, 0),
    "window, ulysses": ({**ATTENTION, **WINDOW, "parallel.cp": 2, **ULYSSES}, 0),
    "capped": ({**ATTENTION, **CAPPED}, 0),
    "capped, window, fp32": ({**ATTENTION, **CAPPED, **WINDOW, "train.precision": "fp32"}, 0),
    "capped, ring": ({**ATTENTION, **CAPPED, "parallel.cp": 4}, 0),
    "capped, window, ring": ({**ATTENTION, **CAPPED, **WINDOW, "parallel.cp": 2}, 0),
    "no rotary positions": ({**ATTENTION, **NOPE, "train.precision": "fp32"}, 0),
    "no rotary positions, every second layer": ({**ATTENTION, "model.attention.nope_every": 2}, 0),
    "no rotary positions, split backward, tp": (
        {**ATTENTION, **NOPE, **PIPELINE, "parallel.pipeline.schedule": "zb_h1", "parallel.tp": 2},
        0,
    ),
    "no rotary positions, norms of heads": ({**ATTENTION, **NOPE, "model.qk_norm": True}, 0),
    "no rotary positions, norms of heads made again, ring": ({**NORMED, **NOPE, "parallel.cp": 4}, 0),
    "norms after": ({**POST, "train.precision": "fp32"}, 0),
    "norms after, tp": ({**POST, "batch.micro": 4, "batch.global": 8, "parallel.tp": 2}, 0),
    "norms after, wide": ({**POST, **WIDE}, 0),
    "norms after, attention most of all": ({**POST, **ATTENTION}, 0),
    "norms after, recompute full": ({**POST, "train.recompute": "full", "batch.micro": 4, **SHARDED}, 0),
    "norms after, recompute selective": ({**POST, "train.recompute": "selective", "batch.micro": 4}, 0),
    "norms after, recompute selective, tp": ({**POST, "train.recompute": "selective", "parallel.tp": 2}, 0),
    "norms after, offloaded and recomputed": (  # the inputs of three micro-batches are on the host
        {**POST, "train.offload_activations": True, "train.recompute": "full", **PIPELINE, "parallel.pp": 4},
        1,
    ),
    "norms after, offloaded": ({**POST, "train.offload_activations": True, **PIPELINE}, 1),
    "gemma": (GEMMA, 0),
    "gemma, fp32, norms of heads, selective": (
        {**GEMMA, "model.qk_norm": True, "train.precision": "fp32", "train.recompute": "selective"},
        0,
    ),
    "gemma, few tokens": ({**GEMMA, "model.sequence_length": 192, "model.vocab_size": 16384}, 0),
    "gemma, head in chunks, tp, last of 2 stages": (
        {**GEMMA, **CHUNKED, "parallel.pp": 2, "parallel.tp": 2, "batch.global": 96},
        1,
    ),
    "norms after, zb_h1": ({**POST, "parallel.pipeline.schedule": "zb_h1", "parallel.tp": 2, **PIPELINE}, 0),
    "norms after, zbv": (
        {**POST, "parallel.pipeline.schedule": "zbv", "parallel.data.mode": "zero1", **SHARDED, **PIPELINE},
        0,
    ),
    "norms after, muon": ({**POST, "optim.name": "muon", "parallel.tp": 2, **SHARDED}, 0),
    "norms of all heads made again, ring": ({**NORMED, **POST, "parallel.cp": 4}, 0),
    "norms of all heads made again, tp": ({**NORMED, **POST, "parallel.tp": 4}, 0),
    "ring": ({"parallel.cp": 4, "model.sequence_length": 4096, "parallel.tp": 2}, 0),
    "all_gather": ({"parallel.cp": 8, "model.sequence_length": 16384, "train.recompute": "full", **ALL_GATHER}, 0),
    "norms of heads made again, ring": ({**NORMED, "parallel.cp": 4}, 0),
    "norms of heads made again, all_gather": ({**NORMED, "parallel.cp": 4, **ALL_GATHER}, 0),
    "norms of heads made again, ulysses": ({**NORMED, "parallel.cp": 4, **ULYSSES}, 0),
    "norms of heads made again, documents": ({**NORMED, **DOCUMENTS}, 0),
    "ulysses": ({"parallel.cp": 8, "parallel.context.method": "ulysses", "model.sequence_length": 4096}, 0),
    "documents": ({"parallel.cp": 2, "model.sequence_length": 4096, **DOCUMENTS}, 0),
    "documents, ulysses": ({"parallel.cp": 2, "model.sequence_length": 4096, **ULYSSES, **DOCUMENTS}, 0),
    "documents, no context parallelism": ({"model.sequence_length": 2048, **DOCUMENTS}, 0),
    "documents in several samples, tp": ({"batch.micro": 2, "parallel.tp": 2, **DOCUMENTS, **ATTENTION}, 0),
    "documents in several samples, positions go on": (
        {"batch.micro": 8, "batch.global": 16, **DOCUMENTS, "data.reset_positions": False, "model.head_width": 256},
        0,
    ),
    "documents in several samples, balance loss": ({"batch.micro": 2, **EXPERTS, **BALANCED, **DOCUMENTS}, 0),
    "1f1b": ({"parallel.data.mode": "zero2", **SHARDED, **PIPELINE}, 0),
    "gpipe": ({"parallel.pipeline.schedule": "gpipe", "train.precision": "fp32", **PIPELINE}, 1),
    "interleaved_1f1b": ({"parallel.pipeline.schedule": "interleaved_1f1b", **SHARDED, **PIPELINE}, 0),
    "zb_h1": ({"parallel.pipeline.schedule": "zb_h1", "train.precision": "fp32", "parallel.tp": 2, **PIPELINE}, 0),
    "zb_h2": (
        {
            "parallel.pipeline.schedule": "zb_h2",
            "train.recompute": "selective",
            "parallel.data.mode": "zero3",
            **PIPELINE,
        },
        0,
    ),
    "zbv": ({"parallel.pipeline.schedule": "zbv", "parallel.data.mode": "zero1", **SHARDED, **PIPELINE}, 0),
    "zb_h1, zero3": ({**ZERO3, "parallel.pipeline.schedule": "zb_h1", **SHARDED, **PIPELINE}, 0),
    "zb_h1, zero3, last stage": ({**ZERO3, "parallel.pipeline.schedule": "zb_h1", **SHARDED, **PIPELINE}, 1),
    "zb_h1, zero3, micro-batch of 4": (
        {
            **ZERO3,
            "parallel.pipeline.schedule": "zb_h1",
            **SHARDED,
            **PIPELINE,
            "batch.micro": 4,
            "batch.global": 32,
        },
        0,
    ),
    "zbv, zero3": ({**ZERO3, "parallel.pipeline.schedule": "zbv", **SHARDED, **PIPELINE}, 0),
    "zbv, zero2, few tokens": (
        {**ZERO2, **FEW_TOKENS, "parallel.pipeline.schedule": "zbv", **SHARDED, **PIPELINE},
        1,
    ),
    "zb_h1, tied, last stage": ({**TIED, "parallel.pipeline.schedule": "zb_h1", **SHARDED, **PIPELINE}, 1),
    "zbv, tied": ({**TIED, "parallel.pipeline.schedule": "zbv", **SHARDED, **PIPELINE}, 0),
    "zbv, tied, zero2": ({**TIED, "parallel.pipeline.schedule": "zbv", **ZERO2, **SHARDED, **PIPELINE}, 0),
    "1f1b, replicas, bf16 reduction": ({**ZERO2, **NARROW, **HYBRID, **PIPELINE}, 0),
    "zb_h1, replicas": ({**ZERO2, "parallel.pipeline.schedule": "zb_h1", **HYBRID, **PIPELINE}, 0),
    "zb_h1, replicas, many micro-batches": (
        {**ZERO2, "parallel.pipeline.schedule": "zb_h1", **HYBRID, **PIPELINE, "batch.global": 32},
        0,
    ),
    "zb_h1, replicas, bf16 reduction": (
        {**ZERO2, **NARROW, "parallel.pipeline.schedule": "zb_h1", **HYBRID, **PIPELINE},
        0,
    ),
    "zbv, zero2, selective and offloaded": (
        {
            **ZERO2,
            "parallel.pipeline.schedule": "zbv",
            "train.recompute": "selective",
            "train.offload_activations": True,
            "parallel.tp": 2,
            **SHARDED,
            **PIPELINE,
        },
        0,
    ),
    "head in chunks": ({**CHUNKED, **SHARDED}, 0),
    "head in chunks, fp32": ({**CHUNKED, "train.precision": "fp32"}, 0),
    "head in chunks, tp": ({**CHUNKED, "parallel.tp": 2, "parallel.dp_shard": 2}, 0),
    "head in chunks, last of 2 stages": ({**CHUNKED, "parallel.pp": 2, "batch.global": 96}, 1),
    "mtp": (MTP, 0),
    "mtp, depth 3, few tokens, zero3": ({**MTP, "model.mtp.depth": 3, **SHARDED, **FEW_TOKENS, **ZERO3}, 0),
    "mtp, tied, tp, fp32": ({**MTP, **TIED, "parallel.tp": 2, "train.precision": "fp32"}, 0),
    "mtp, last of 2 stages, tp, split backward": (
        {**MTP, **PIPELINE, "parallel.tp": 2, "parallel.pipeline.schedule": "zb_h1"},
        1,
    ),
    "mtp, recompute full, head in chunks": ({**MTP, **CHUNKED, "train.recompute": "full"}, 0),
    "mtp, experts, selective, offloaded, zero2": (
        {**MTP, **EXPERTS, **SHARDED, **ZERO2, "train.recompute": "selective", "train.offload_activations": True},
        0,
    ),
    "mtp, large vocabulary": ({**MTP, **FEW_TOKENS, "model.vocab_size": 1 << 16}, 0),
    "mtp, large vocabulary, zero3": ({**MTP, **SHARDED, **FEW_TOKENS, **ZERO3, "model.vocab_size": 1 << 16}, 0),
    "mtp, small vocabulary": ({**MTP, "model.vocab_size": 64, "batch.micro": 4, "batch.global": 8}, 0),
    "experts": (EXPERTS, 0),
    "experts, 8 of 32": (
        {"model.experts.count": 32, "model.experts.active": 8, "model.experts.width": 64, **BALANCED},
        0,
    ),
    "gpt-oss": ({**EXPERTS, **GPT_OSS}, 0),
    "gpt-oss, narrow, selective": ({**NARROW_EXPERTS, **GPT_OSS, "train.recompute": "selective"}, 0),
    "experts, narrow": (NARROW_EXPERTS, 0),
    "experts, narrow, selective": ({**NARROW_EXPERTS, "train.recompute": "selective"}, 0),
    "experts, narrow, full, 1f1b": (
        {**NARROW_EXPERTS, **BALANCED, **PIPELINE, "model.layers": 8, "batch.global": 32, "train.recompute": "full"},
        0,
    ),
    "experts, narrow, a budget that keeps all": (
        {**NARROW_EXPERTS, "model.layers": 4, "train.recompute": "budget", "train.recompute_budget": 1.0},
        0,
    ),
    "experts, narrow, offloaded": ({**NARROW_EXPERTS, "train.offload_activations": True}, 0),
    "experts, narrow, zb_h1, selective": (
        {
            **NARROW_EXPERTS,
            **PIPELINE,
            "batch.global": 32,
            "parallel.pipeline.schedule": "zb_h1",
            "train.recompute": "selective",
        },
        0,
    ),
    "experts, full, balance loss": ({**EXPERTS, **BALANCED, "train.recompute": "full"}, 0),
    "experts, a shared one": ({**EXPERTS, **SHARED}, 0),
    "experts, a shared one, full": ({**EXPERTS, **SHARED, "train.recompute": "full"}, 0),
    "experts, narrow, selective, a shared one": (
        {**NARROW_EXPERTS, **SHARED, "train.recompute": "selective"},
        0,
    ),
    "experts, narrow, full, a shared one, zb_h1": (
        {
            **NARROW_EXPERTS,
            **SHARED,
            **PIPELINE,
            "batch.global": 32,
            "parallel.pipeline.schedule": "zb_h1",
            "train.recompute": "full",
        },
        0,
    ),
    "experts of later layers, full, dualpipev": (
        {
            **EXPERTS,
            **PIPELINE,
            "model.layers": 8,
            "model.experts.first_dense": 3,
            "parallel.pipeline.schedule": "dualpipev",
            "train.recompute": "full",
        },
        0,
    ),
    "experts, zero2": ({**EXPERTS, **ZERO2, "parallel.dp_shard": 4}, 0),
    "experts, zero3, muon": ({**EXPERTS, "optim.name": "muon", "parallel.dp_shard": 4}, 0),
    "experts, zbv, zero2": ({**EXPERTS, **ZERO2, "parallel.pipeline.schedule": "zbv", **SHARDED, **PIPELINE}, 0),
    "experts, zb_h1, zero3, few tokens": (
        {**EXPERTS, **ZERO3, **FEW_TOKENS, "parallel.pipeline.schedule": "zb_h1", **SHARDED, **PIPELINE},
        0,
    ),
    "experts apart, zb_h1, zero2, few tokens": (
        {**APART, **ZERO2, **FEW_TOKENS, "parallel.pipeline.schedule": "zb_h1", **PIPELINE},
        0,
    ),
    "experts, ring, balance loss, fp32": (
        {**EXPERTS, **BALANCED, "parallel.cp": 2, "train.precision": "fp32", "model.experts.scores": "sigmoid"},
        0,
    ),
    "latent": (LATENT, 0),
    "latent, fp32": ({**LATENT, "train.precision": "fp32"}, 0),
    "latent, long": ({**LATENT, "model.sequence_length": 2048}, 0),
    "latent of keys": ({**KEYS, "batch.micro": 4}, 0),
    "latent, selective": ({**LATENT, "train.recompute": "selective", "batch.micro": 4}, 0),
    "latent, full": ({**LATENT, "train.recompute": "full", "model.layers": 6}, 0),
    "latent, offloaded": ({**LATENT, "train.offload_activations": True}, 0),
    "latent, tp, zero3": ({**LATENT, **SHARDED, "parallel.tp": 2, "model.sequence_length": 2048}, 0),
    "latent of keys, tp 4, zero2": ({**KEYS, **ZERO2, **SHARDED, "parallel.tp": 4, "model.sequence_length": 2048}, 0),
    "latent, ring": ({**LATENT, "parallel.cp": 4, "model.sequence_length": 2048}, 0),
    "latent, all_gather": ({**LATENT, **ALL_GATHER, "parallel.cp": 2, "model.sequence_length": 2048}, 0),
    "latent, ulysses": ({**LATENT, **ULYSSES, "parallel.cp": 2, "model.sequence_length": 2048}, 0),
    "latent, ring, window": ({**LATENT, **WINDOW, "parallel.cp": 2, "model.sequence_length": 2048}, 0),
    "latent, capped": ({**LATENT, **CAPPED}, 0),
    "latent, documents": ({**LATENT, **DOCUMENTS}, 0),
    "latent, zb_h1, tp": ({**LATENT, **PIPELINE, "parallel.pipeline.schedule": "zb_h1", "parallel.tp": 2}, 0),
    "latent of keys, dualpipev, muon": (
        {**KEYS, **PIPELINE, "parallel.pipeline.schedule": "dualpipev", "optim.name": "muon"},
        0,
    ),
    "dualpipev": ({"parallel.pipeline.schedule": "dualpipev", "train.precision": "fp32", **PIPELINE}, 1),
    "experts apart, dualpipev, shared": ({**APART, **SHARED, **PAIRED, "parallel.data.mode": "zero1"}, 0),
    "experts apart, dualpipev, selective": (
        {**APART, **PAIRED, "train.recompute": "selective", "parallel.data.mode": "zero3"},
        1,
    ),
    "experts apart, narrow, dualpipev": ({**NARROW_APART, **PAIRED, "batch.global": 128, **ZERO2}, 0),
    "experts apart, zero1": ({**APART, "parallel.data.mode": "zero1"}, 0),
    "experts apart, zero2": ({**APART, **ZERO2}, 0),
    "experts apart, zero3": ({**APART, "parallel.data.mode": "zero3"}, 0),
    "experts apart, ddp, a shared one": ({**APART, **SHARED, "parallel.data.mode": "ddp"}, 0),
    "experts apart, tp, of all ranks, full, a shared one": (
        {**APART, **SHARED, "parallel.tp": 2, "parallel.dp_shard": 2, "parallel.ep": 4, "train.recompute": "full"},
        0,
    ),
    "experts apart, selective": ({**APART, "train.recompute": "selective"}, 0),
    "experts apart, offloaded": ({**APART, "train.offload_activations": True}, 0),
    "experts apart, narrow": (NARROW_APART, 0),
    "experts apart, narrow, fp32, selective": (
        # With fewer, more than the tolerance: 2 MiB of temporaries are not predicted, and gathered weights too high.
        {**NARROW_APART, "model.experts.count": 32, "train.precision": "fp32", "train.recompute": "selective"},
        0,
    ),
    "experts apart, narrow, offloaded": ({**NARROW_APART, "train.offload_activations": True}, 0),
    "experts apart, narrow, zb_h1": ({**PIPELINE, **NARROW_APART, "parallel.pipeline.schedule": "zb_h1"}, 0),
    "experts apart, narrow, selective, a shared one": (
        {**PIPELINE, **NARROW_APART, **SHARED, "train.recompute": "selective"},
        0,
    ),
    "experts apart, narrow, full, a shared one": ({**NARROW_APART, **SHARED, "train.recompute": "full"}, 0),
    "experts apart, narrow, selective, a shared one, zb_h1": (
        {
            **PIPELINE,
            **NARROW_APART,
            **SHARED,
            "batch.global": 128,
            "parallel.pipeline.schedule": "zb_h1",
            "train.recompute": "selective",
        },
        0,
    ),
    "experts apart, muon": ({**APART, "optim.name": "muon"}, 0),
    "experts apart, three of a rank, zero3": ({**THREE_APART, "parallel.data.mode": "zero3"}, 0),
    "experts apart, three of a rank, zero3, fp32": (
        {**THREE_APART, "parallel.data.mode": "zero3", "train.precision": "fp32"},
        0,
    ),
    "experts apart, three of a rank, muon": ({**THREE_APART, "optim.name": "muon"}, 0),
    "experts, replicas": ({**EXPERTS, "parallel.dp_shard": 4, "parallel.dp_replicate": 2, "batch.global": 16}, 0),
    "experts, six on four ranks, zero2": ({**SIX, **ZERO2}, 0),
    "experts, six on four ranks, zero3": ({**SIX, "parallel.data.mode": "zero3"}, 0),
    "experts, six on four ranks, zb_h1, zero2": (
        {**SIX, **ZERO2, **PIPELINE, "parallel.pipeline.schedule": "zb_h1"},
        0,
    ),
    "experts apart, replicas": ({**APART, "parallel.dp_replicate": 2, "batch.global": 16}, 0),
    "experts apart, zbv": ({**APART, **ZERO2, "parallel.pipeline.schedule": "zbv", **PIPELINE}, 0),
    "experts apart, zb_h1, a shared one": ({**APART, **SHARED, "parallel.pipeline.schedule": "zb_h1", **PIPELINE}, 0),
    "worst-case buffers, zero1": ({**FIXED, "parallel.data.mode": "zero1"}, 0),
    "worst-case buffers, zero3, selective, muon": (
        {**FIXED, "parallel.data.mode": "zero3", "train.recompute": "selective", "optim.name": "muon"},
        0,
    ),
    "worst-case buffers, tp, of all ranks, full, a shared one": (
        {**FIXED, **SHARED, "parallel.tp": 2, "parallel.dp_shard": 2, "parallel.ep": 4, "train.recompute": "full"},
        0,
    ),
    "worst-case buffers, gpt-oss, a shared one": ({**FIXED, **GPT_OSS, **SHARED}, 0),
    "worst-case buffers, one expert a rank": (
        {**FIXED, "parallel.dp_shard": 8, "parallel.ep": 8, "model.experts.width": 128},
        0,
    ),
    "worst-case buffers, narrow": (NARROW_FIXED, 0),
    "worst-case buffers, narrow, of 8 ranks": ({**NARROW_FIXED, "parallel.dp_shard": 8, "parallel.ep": 8}, 0),
    "worst-case buffers, narrow, fp32, selective": (
        {**NARROW_FIXED, "train.precision": "fp32", "train.recompute": "selective"},
        0,
    ),
    "worst-case buffers, narrow, full": ({**NARROW_FIXED, "train.recompute": "full"}, 0),
    "worst-case buffers, narrow, offloaded": ({**NARROW_FIXED, "train.offload_activations": True}, 0),
    "worst-case buffers, narrow, zb_h1": ({**PIPELINE, **NARROW_FIXED, "parallel.pipeline.schedule": "zb_h1"}, 0),
    "worst-case buffers, narrow, dualpipev": ({**NARROW_FIXED, **PAIRED, "batch.global": 64}, 0),
    "worst-case buffers, narrow, dualpipev, selective": (
        {**NARROW_FIXED, **PAIRED, "batch.global": 64, "train.recompute": "selective"},
        0,
    ),
    "worst-case buffers, narrow, zb_h1, a shared one": (
        {**PIPELINE, **NARROW_FIXED, **SHARED, "parallel.pipeline.schedule": "zb_h1"},
        0,
    ),
}


def configured(overrides: Overrides) -> Config:
    """A model of 4 million parameters, changed by `overrides`."""
    values = {f"model.{key}": value for key, value in SIZES.items()} | {"parallel.dp_shard": 1, **overrides}
    return check(load([], [f"{key}={value}" for key, value in values.items()]))
