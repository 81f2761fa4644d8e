"""Rules of the adapter section: what it adapts must be there, and what else may be used beside it."""

from collections.abc import Iterator

from megalite.base.errors import Problem, listing
from megalite.config.layers import inputs_of_matrices, targets_of
from megalite.config.layout import FOUR_BIT_BLOCK
from megalite.config.schema import Config


def adapter_rules(config: Config) -> Iterator[Problem]:
    """Every broken rule of the adapter section."""
    adapter = config.adapter
    if adapter is None:
        if config.checkpoint.export == "peft":
            yield Problem("checkpoint.export", "is for runs with adapter", "use hf, or set adapter.rank", "peft")
        return
    if adapter.targets != "all" and config.model.heads >= 1 and config.model.layers >= 1:
        there = targets_of(config.model)
        if not adapter.targets:
            rule = "must name something: else nothing is trained"
            yield Problem("adapter.targets", rule, f"use all, or some of {listing(there)}", [])
        for name in adapter.targets:
            if name not in there:
                fix = f"this model has {listing(there, 'and')}"
                yield Problem("adapter.targets", "names what the model does not have", fix, name)
        if len({*adapter.targets}) < len(adapter.targets):
            yield Problem("adapter.targets", "names something twice", "name each once", adapter.targets)
    ends = [] if adapter.targets == "all" else [name for name in ("embedding", "head") if name in adapter.targets]
    if ends and config.model.tie_embeddings:
        rule = (
            f"cannot have {listing(ends, 'and')} with model.tie_embeddings: one weight, with two sums, cannot be merged"
        )
        yield Problem("adapter.targets", rule, "use targets in layers", adapter.targets)
    if adapter.dropout and "head" in ends:
        rule = "cannot be used with factors of the head, which has no numbers of tokens"
        yield Problem("adapter.dropout", rule, "use 0, or adapter.targets without head", adapter.dropout)
    if adapter.dropout and (adapter.targets == "all" or "experts" in adapter.targets) and config.model.experts:
        rule = "cannot be used with factors of experts, to which tokens come without their numbers"
        yield Problem("adapter.dropout", rule, "use 0, or adapter.targets without experts", adapter.dropout)
    if adapter.dropout and config.train.compile:
        rule = "cannot be used with train.compile, which cannot follow how tokens are known"
        yield Problem("adapter.dropout", rule, "use 0, or train.compile=false", adapter.dropout)
    if adapter.dora and ends:
        rule = f"cannot be used with factors of {listing(ends, 'and')}, whose norms cannot be trained"
        yield Problem("adapter.dora", rule, "use false, or targets in layers", adapter.dora)
    if adapter.dora and config.model.experts and (adapter.targets == "all" or "experts" in adapter.targets):
        rule = "cannot be used with factors of experts, as in PEFT"
        yield Problem("adapter.dora", rule, "use false, or adapter.targets without experts", adapter.dora)
    if config.model.mtp is not None:
        rule = "cannot be used with adapter, which trains no layers of multi-token prediction"
        yield Problem("model.mtp.depth", rule, "use model.mtp=null", config.model.depth)
    if config.model.four_bits:
        yield from _four_bit_rules(config)
    if config.train.precision == "fp8":
        rule = "cannot be used with adapter, whose factors are too narrow for products in 8 bits"
        yield Problem("train.precision", rule, "use bf16", "fp8")


def _four_bit_rules(config: Config) -> Iterator[Problem]:
    """Broken rules of a base in four bits, whose blocks are 64 inputs of an output: no rank may have a part of one."""
    if config.train.product != "plain":
        rule = "cannot be used with adapter.base=nf4, whose weights are made wide layer by layer"
        yield Problem("train.product", rule, "use plain, or adapter.base=compute", config.train.product)
    blocks = f"must be cut into blocks of {FOUR_BIT_BLOCK} inputs for adapter.base=nf4, and by tp between these"
    model, tp = config.model, config.parallel.tp
    for key, inputs, split in inputs_of_matrices(model) if min(model.heads, model.layers, tp) >= 1 else ():
        if inputs % (FOUR_BIT_BLOCK * (tp if split else 1)):
            fix = "use adapter.base=compute" + (", or a smaller parallel.tp" if inputs % FOUR_BIT_BLOCK == 0 else "")
            yield Problem(key, blocks, fix, inputs)
