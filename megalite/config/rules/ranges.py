"""How small and how large the number of a key may be."""

from collections.abc import Iterator
from typing import Any

from megalite.config.errors import Problem

AT_LEAST = {
    "run.seed": 0,
    "model.layers": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_width": 1,
    "model.ffn": 1,
    "model.vocab_size": 1,
    "model.sequence_length": 1,
    "model.rope_scaling.original_length": 1,
    "parallel.pp": 1,
    "parallel.pipeline.virtual_stages": 1,
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 1,
    "parallel.cp": 1,
    "parallel.tp": 1,
    "batch.micro": 1,
    "batch.global": 1,
    "batch.rampup.start": 1,
    "batch.rampup.increment": 1,
    "batch.rampup.tokens": 1,
    "batch.curriculum.start": 1,
    "batch.curriculum.tokens": 1,
    "train.steps": 1,
    "train.recompute_every": 1,
    "train.max_bad_steps": 0,
    "train.rollback_skip": 1,
    "train.spike_window": 8,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "schedule.warmup": 0,
    "schedule.decay": 1,
    "checkpoint.interval": 0,
    "checkpoint.keep": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.max_failures": 0,
    "log.interval": 1,
    "eval.interval": 0,
    "eval.steps": 0,
}
POSITIVE = (
    "model.rope_theta",
    "model.rope_scaling.factor",
    "model.rope_scaling.low_frequency_factor",
    "model.rope_scaling.high_frequency_factor",
    "model.norm_eps",
    "model.init_std",
    "batch.memory",
    "train.recompute_budget",
    "train.spike_threshold",
    "train.timeout",
    "optim.lr",
    "optim.eps",
)
MOST = {"batch.memory": 1e6, "train.recompute_budget": 1e6}  # GiB


def range_rules(plain: dict[str, Any]) -> Iterator[Problem]:
    """Every number of a configuration, as nested dictionaries, that is outside of its bounds."""
    for key, least in AT_LEAST.items():
        value = _at(plain, key)
        if isinstance(value, int | float) and value < least:
            yield Problem(key, f"must be at least {least}", value=value)
    for key in POSITIVE:
        value = _at(plain, key)
        if value is not None and value <= 0:
            yield Problem(key, "must be greater than 0", value=value)
    for key, most in MOST.items():
        value = _at(plain, key)
        if value is not None and value > 0 and not value <= most:
            yield Problem(key, f"must be at most {most:,.0f} GiB", value=value)


def _at(plain: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None inside a section that is null."""
    section, _, rest = key.partition(".")
    inner = plain[section]
    return inner if not rest or inner is None else _at(inner, rest)
