"""Rules of the adapter section: what it adapts must be there, and what else may be used beside it."""

from collections.abc import Iterator

from megalite.base.errors import Problem, listing
from megalite.config.layers import Latent, SwiGLU, layer_kinds
from megalite.config.layout import shard_dim
from megalite.config.schema import Config, Model, Target


def adapter_rules(config: Config) -> Iterator[Problem]:
    """Every broken rule of the adapter section."""
    adapter = config.adapter
    if adapter is None:
        return
    if adapter.targets != "all" and config.model.heads >= 1 and config.model.layers >= 1:
        there = targets_of(config.model)
        if not adapter.targets:
            rule = "must name something: else nothing is trained"
            yield Problem("adapter.targets", rule, f"use all, or some of {listing(there)}", [])
        for name in adapter.targets:
            if name not in there:
                fix = f"this model has {listing(there, 'and')}"
                yield Problem("adapter.targets", "names what no layer of the model has", fix, name)
    if adapter.dropout and (adapter.targets == "all" or "experts" in adapter.targets) and config.model.experts:
        rule = "cannot be used with factors of experts, to which tokens come without their numbers"
        yield Problem("adapter.dropout", rule, "use 0, or adapter.targets without experts", adapter.dropout)
    if adapter.dropout and config.train.compile:
        rule = "cannot be used with train.compile, which cannot follow how tokens are known"
        yield Problem("adapter.dropout", rule, "use 0, or train.compile=false", adapter.dropout)
    if adapter.base == "nf4":
        yield from _four_bit_rules(config)
    if config.train.precision == "fp8":
        rule = "cannot be used with adapter, whose factors are too narrow for products in 8 bits"
        yield Problem("train.precision", rule, "use bf16", "fp8")
    if config.checkpoint.export is not None:
        rule = "cannot be used with adapter: checkpoints hold adapters alone"
        fix = "use null, and megalite-convert when the run is done, with --merge or to peft:PATH"
        yield Problem("checkpoint.export", rule, fix, config.checkpoint.export)


def _four_bit_rules(config: Config) -> Iterator[Problem]:
    """Broken rules of a base in four bits, whose blocks are 64 inputs of an output: no rank may have a part of one."""
    for key, other in (("train.compile", False), ("train.product", "plain")):
        value = getattr(config.train, key.removeprefix("train."))
        if value != other:
            rule = "cannot be used with adapter.base=nf4, whose weights are made wide layer by layer"
            yield Problem(key, rule, f"use {str(other).lower()}, or adapter.base=compute", value)
    blocks = "must be cut into blocks of 64 inputs for adapter.base=nf4, and by tp between these"
    for key, inputs, ranks in _inputs(config):
        if inputs % (64 * ranks):
            fix = "use adapter.base=compute" + (", or a smaller parallel.tp" if inputs % 64 == 0 else "")
            yield Problem(key, blocks, fix, inputs)
    model, parallel = config.model, config.parallel
    if model.experts is not None and isinstance(parallel.dp_shard, int) and parallel.ep >= 1:
        count, shards = model.experts.count // parallel.ep, parallel.expert_shards
        outputs = model.experts.width or model.ffn, model.width
        if any(shard_dim((count, each), shards) is None for each in outputs):
            rule = f"leaves {shards} ranks to shard the same experts, which divide neither their number nor their width"
            yield Problem("parallel.ep", rule, "use another, or adapter.base=compute", parallel.ep)


def _inputs(config: Config) -> Iterator[tuple[str, int, int]]:
    """By key: features that matrices of layers take, and the ranks that share these out."""
    model, tp = config.model, config.parallel.tp
    yield "model.width", model.width, 1
    for kind in dict.fromkeys(layer_kinds(model)):
        attention, mixture = kind.attention, kind.mixture
        yield "model.heads · head_width", attention.heads.outputs, tp
        if isinstance(attention, Latent):
            yield "model.attention.latent.key_rank", attention.key_rank, 1
            if attention.query_rank is not None:
                yield "model.attention.latent.query_rank", attention.query_rank, 1
        if isinstance(kind.feed_forward, SwiGLU):
            yield "model.ffn", kind.feed_forward.width, tp
        if mixture is not None:
            yield "model.experts.width", mixture.width, 1
            if mixture.shared is not None:
                yield "model.experts.shared_width", mixture.shared.width, tp


def targets_of(model: Model) -> list[Target]:
    """The targets that layers of `model` have."""
    kinds = layer_kinds(model)
    found: list[Target] = ["query", "key", "value", "attention_output"]
    latents = [kind.attention for kind in kinds if isinstance(kind.attention, Latent)]
    if latents:
        found.append("latent")
    if any(each.query_rank for each in latents):
        found.append("query_latent")
    mixtures = [kind.mixture for kind in kinds]
    if any(isinstance(kind.feed_forward, SwiGLU) for kind in kinds) or any(each and each.shared for each in mixtures):
        found += ["gate", "up", "down"]
    return found + ["experts"] * any(mixtures)
