"""Lower and upper bounds of every numeric key."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from megalite.base.errors import Problem
from megalite.config.convert import keys, options
from megalite.config.exposition import MAX_PORT

MAX_RANKS = 1 << 24
ANY_MODEL, ANY_CLUSTER, ANY_RUN = "more than any model has", "more than any cluster has", "more than any run takes"
GIB_REASON, SEQUENCE_REASON = "these are GiB", "these are sequences, not tokens"
FLOAT32_REASON = "closer to 0, float32 loses it"
MINIMA: dict[str, float | tuple[float, str]] = {  # and why, where that does not go without saying
    "run.seed": 0,
    "model.layers": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_width": 1,
    "model.ffn": 1,
    "model.vocab_size": (2, "one token alone leaves nothing to predict"),
    "model.sequence_length": 1,
    "model.rope_theta": (1, "the first pair of a head turns fastest"),
    "model.rotary_width": (2, "the features of a pair turn together; model.attention.nope_every=1 turns none"),
    "model.rope_scaling.factor": (1, "it stretches"),
    "model.rope_scaling.low_frequency_factor": (0.001, "model.rope_scaling.original_length is divided by it"),
    "model.rope_scaling.high_frequency_factor": (0.001, "model.rope_scaling.original_length is divided by it"),
    "model.rope_scaling.original_length": 1,
    "model.rope_scaling.beta_fast": (0.001, "model.rope_scaling.original_length is divided by it"),
    "model.rope_scaling.beta_slow": (0.001, "model.rope_scaling.original_length is divided by it"),
    "model.rope_scaling.attention_factor": (1e-3, "closer to 0, attention is the same to all tokens"),
    "model.rope_scaling.mscale": 0,
    "model.rope_scaling.mscale_all_dim": 0,
    "model.attention.window": (1, "a query attends to its own token at least"),
    "model.attention.full_every": 1,
    "model.attention.window_rope_theta": (1, "the first pair of a head turns fastest"),
    "model.attention.scale": (1e-6, "closer to 0, all scores are equal"),
    "model.attention.softcap": (1e-3, "closer to 0, all scores are equal"),
    "model.attention.nope_every": (1, "with 1, no layer has rotary positions"),
    "model.attention.latent.query_rank": 1,
    "model.attention.latent.key_rank": 1,
    "model.attention.latent.value_width": 1,
    "model.experts.count": (2, "a single expert is a plain feed-forward"),
    "model.experts.active": 1,
    "model.experts.width": 1,
    "model.experts.first_dense": 0,
    "model.experts.every": 1,
    "model.experts.scale": (1e-6, "what experts make would be lost"),
    "model.experts.groups": 1,
    "model.experts.active_groups": 1,
    "model.experts.correction_rate": 0,
    "model.experts.shared_width": 1,
    "model.experts.balance_loss": 0,
    "model.experts.z_loss": 0,
    "model.norm_eps": (1e-30, FLOAT32_REASON),
    "model.init_std": (1e-10, "products of smaller weights are lost in float32"),
    "model.base.width": 1,
    "model.base.layers": 1,
    "model.base.head_width": 1,
    "model.mtp.depth": 1,
    "model.mtp.weight": (1e-6, "its layers would learn nothing; model.mtp=null has none"),
    "model.embedding_multiplier": (1e-6, "what the model reads would be lost"),
    "adapter.rank": 1,
    "adapter.alpha": (1e-6, "what adapters add would be lost"),
    "adapter.dropout": 0,
    "model.logits_multiplier": (1e-6, "all tokens would be as likely"),
    "model.logits_softcap": (1e-3, "closer to 0, all tokens are as likely"),
    "parallel.pp": 1,
    "parallel.pipeline.virtual_stages": 1,
    "parallel.pipeline.memory": (1e-9, GIB_REASON),
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 1,
    "parallel.cp": 1,
    "parallel.tp": 1,
    "parallel.ep": 1,
    "batch.micro": 1,
    "batch.global": 1,
    "batch.memory": (1e-6, GIB_REASON),
    "batch.rampup.start": 1,
    "batch.rampup.increment": 1,
    "batch.rampup.tokens": 1,
    "batch.curriculum.start": 1,
    "batch.curriculum.tokens": 1,
    "train.steps": 1,
    "train.recompute_every": 1,
    "train.recompute_budget": (1e-6, GIB_REASON),
    "train.gc_interval": 0,
    "train.max_bad_steps": 0,
    "train.rollback_skip": 1,
    "train.spike_window": 8,
    "train.spike_threshold": (0.1, "about half of all losses are as far above their median"),
    "train.timeout": (1, "these are seconds, in which every rank has to give a sign of life"),
    "optim.lr": (1e-30, FLOAT32_REASON),
    "optim.eps": (1e-30, f"{FLOAT32_REASON}, and divides by 0"),
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "optim.muon.momentum": 0,
    "optim.muon.steps": 1,
    "schedule.warmup": 0,
    "schedule.decay": 1,
    "schedule.floor": 0,
    "data.remote.cache_size": (1e-3, GIB_REASON),
    "data.remote.timeout": (1, "these are seconds, and a server may take as long to answer"),
    "checkpoint.interval": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.max_failures": 0,
    "checkpoint.export_every": 0,
    "checkpoint.export_keep": 0,
    "checkpoint.export_timeout": (1, "these are seconds, and a server may take as long to load a model"),
    "checkpoint.local.interval": 1,
    "checkpoint.local.replicas": 0,
    "log.interval": 1,
    "log.prometheus": 1,
    "eval.interval": 0,
    "eval.steps": 0,
    "profile.start": 0,
    "profile.steps": 1,
}
MAXIMA: dict[str, tuple[float, str]] = {  # and why; whole numbers that are not here are bounded by DEFAULT_MAXIMUM
    "run.seed": ((1 << 63) - 1, "checkpoints keep it in 64 bits"),
    "model.layers": (10_000, ANY_MODEL),
    "model.width": (1 << 20, ANY_MODEL),
    "model.heads": (1 << 16, ANY_MODEL),
    "model.kv_heads": (1 << 16, ANY_MODEL),
    "model.head_width": (1 << 16, ANY_MODEL),
    "model.ffn": (1 << 24, ANY_MODEL),
    "model.vocab_size": (1 << 27, ANY_MODEL),
    "model.sequence_length": (1 << 30, ANY_MODEL),
    "model.rotary_width": (1 << 16, ANY_MODEL),
    "model.rope_theta": (10**15, "no sequence is long enough to tell the difference"),
    "model.rope_scaling.factor": (10**6, "no context was stretched as far"),
    "model.rope_scaling.low_frequency_factor": (10**6, "no wavelength is as short"),
    "model.rope_scaling.high_frequency_factor": (10**6, "no wavelength is as short"),
    "model.rope_scaling.beta_fast": (10**6, "no wavelength is as short"),
    "model.rope_scaling.beta_slow": (10**6, "no wavelength is as short"),
    "model.rope_scaling.attention_factor": (1000, "attention would be to a single token"),
    "model.rope_scaling.mscale": (1000, "attention would be to a single token"),
    "model.rope_scaling.mscale_all_dim": (1000, "attention would be to a single token"),
    "model.attention.window": (1 << 30, ANY_MODEL),
    "model.attention.full_every": (10_000, ANY_MODEL),
    "model.attention.window_rope_theta": (10**15, "no sequence is long enough to tell the difference"),
    "model.attention.scale": (1000, "attention would be to a single token"),
    "model.attention.softcap": (10**6, "no score is as far; null caps nothing"),
    "model.attention.nope_every": (10_000, ANY_MODEL),
    "model.attention.latent.query_rank": (1 << 20, ANY_MODEL),
    "model.attention.latent.key_rank": (1 << 20, ANY_MODEL),
    "model.attention.latent.value_width": (1 << 16, ANY_MODEL),
    "model.experts.count": (1 << 16, ANY_MODEL),
    "model.experts.active": (1 << 16, ANY_MODEL),
    "model.experts.width": (1 << 24, ANY_MODEL),
    "model.experts.first_dense": (10_000, ANY_MODEL),
    "model.experts.every": (10_000, ANY_MODEL),
    "model.experts.scale": (10**6, "what layers had would be lost beside it"),
    "model.experts.groups": (1 << 16, ANY_MODEL),
    "model.experts.active_groups": (1 << 16, ANY_MODEL),
    "model.experts.correction_rate": (1, "a single step would decide all choices"),
    "model.experts.shared_width": (1 << 24, ANY_MODEL),
    "model.experts.balance_loss": (1000, "nothing else would be learned"),
    "model.experts.z_loss": (1000, "nothing else would be learned"),
    "model.mtp.depth": (64, ANY_MODEL),
    "model.mtp.weight": (1000, "nothing else would be learned"),
    "model.norm_eps": (1, "it would drown the mean square that it is added to"),
    "model.init_std": (10, "no training recovers from such weights"),
    "model.base.width": (1 << 20, ANY_MODEL),
    "model.base.layers": (10_000, ANY_MODEL),
    "model.base.head_width": (1 << 16, ANY_MODEL),
    "model.embedding_multiplier": (10**6, "what layers add would be lost beside it"),
    "model.logits_multiplier": (10**6, "a single token would be likely"),
    "model.logits_softcap": (10**6, "no logit is as far; null caps nothing"),
    "adapter.rank": (1 << 16, ANY_MODEL),
    "adapter.alpha": (10**6, "what the model makes would be lost beside it"),
    "adapter.dropout": (0.99, "adapters would see nothing"),
    "parallel.pp": (512, "no pipeline is as deep"),
    "parallel.pipeline.virtual_stages": (1000, "no pipeline is as deep"),
    "parallel.pipeline.memory": (10**6, GIB_REASON),
    "parallel.dp_replicate": (MAX_RANKS, ANY_CLUSTER),
    "parallel.dp_shard": (MAX_RANKS, ANY_CLUSTER),
    "parallel.cp": (MAX_RANKS, ANY_CLUSTER),
    "parallel.tp": (MAX_RANKS, ANY_CLUSTER),
    "parallel.ep": (MAX_RANKS, ANY_CLUSTER),
    "batch.micro": (1 << 20, SEQUENCE_REASON),
    "batch.global": (1 << 20, SEQUENCE_REASON),
    "batch.memory": (10**6, GIB_REASON),
    "batch.rampup.start": (1 << 20, SEQUENCE_REASON),
    "batch.rampup.increment": (1 << 20, SEQUENCE_REASON),
    "batch.rampup.tokens": (1 << 60, ANY_RUN),
    "batch.curriculum.tokens": (1 << 60, ANY_RUN),
    "train.recompute_budget": (10**6, GIB_REASON),
    "train.spike_window": (1_000_000, "losses as old as that tell nothing"),
    "train.spike_threshold": (10**6, "no loss is as far; train.on_spike=ignore looks for none"),
    "train.timeout": (10**7, "these are seconds, and it would never end a hang"),
    "optim.lr": (100, "AdamW moves weights by as much in a step"),
    "optim.eps": (1, "it would drown the gradients that it is added to"),
    "optim.weight_decay": (1e38, "float32 knows no larger number"),
    "optim.clip_norm": (1e38, "float32 knows no larger number; 0 clips nothing"),
    "optim.muon.momentum": (0.9999, "closer to 1, a gradient takes thousands of steps to count"),
    "optim.muon.steps": (100, "singular values come no nearer to 1"),
    "data.remote.cache_size": (10**6, GIB_REASON),
    "data.remote.timeout": (10**7, "these are seconds, and it would never end a stall"),
    "checkpoint.export_timeout": (10**5, "these are seconds, and newer exports wait meanwhile"),
    "checkpoint.local.replicas": (1, "with one, any node may be lost"),
    "schedule.floor": (1, "it is a share of optim.lr"),
    "log.prometheus": (MAX_PORT, "it is a port of TCP"),
    "profile.steps": (100, "the traces of more fill memory and disks"),
}
DEFAULT_MAXIMUM = 10**12, ANY_RUN


def range_rules(plain: dict[str, Any]) -> Iterator[Problem]:
    """Every number that is outside of its bounds, in a configuration of nested dictionaries."""
    for key, bound in MINIMA.items():
        value, (least, reason) = _at(plain, key), bound if isinstance(bound, tuple) else (bound, "")
        if isinstance(value, int | float) and not value >= least:
            yield Problem(key, f"must be at least {least}{f': {reason}' if reason else ''}", value=value)
    for key in _bounded():
        value, (bound, reason) = _at(plain, key), MAXIMA.get(key, DEFAULT_MAXIMUM)
        if isinstance(value, int | float) and not value <= bound:
            yield Problem(key, f"must be at most {bound:,}: {reason}", value=value)


def most(key: str) -> float:
    """The upper bound of a key."""
    return MAXIMA.get(key, DEFAULT_MAXIMUM)[0]


@cache
def _bounded() -> tuple[str, ...]:
    """Keys that have an upper bound: those of all whole numbers, and those of MAXIMA."""
    return tuple(key for key, hint in keys().items() if "[]" not in key and (key in MAXIMA or int in options(hint)))


def _at(plain: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None inside a section that is null."""
    section, _, rest = key.partition(".")
    inner = plain[section]
    return inner if not rest or inner is None else _at(inner, rest)
