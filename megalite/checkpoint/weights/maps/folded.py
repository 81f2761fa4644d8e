"""The same function with plain layers: what other programs do not multiply is folded into weights. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import replace

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.families import is_known
from megalite.config.model_schema import Model
from megalite.config.parametrization import multipliers


def folded(model: Model) -> tuple[Model, dict[str, float]]:
    """Return a model without multipliers, and by name the factors from the weights of `model` to its own; others stay.

    Its logits are those of `model`. It is not trained as `model` is: its learning rates and initial weights would have
    to differ. A model whose multipliers some family of transformers has, such as Gemma's, stays as it is. Raises
    InputError where a factor belongs into a norm to whose weight 1 is added.
    """
    factors = {name: factor for name, factor in _factors(model) if factor != 1}
    if factors and is_known(model):
        return model, {}
    if model.norm_gain == "one_plus_weight" and any(name.endswith("norm.weight") for name in factors):
        rule = (
            "has multipliers, which other programs lack and which cannot go into weights of norms to which 1 is added"
        )
        raise InputError(f"a model with model.norm_gain = one_plus_weight {rule}")
    plain = replace(model, parametrization="standard", base=None, embedding_multiplier=1.0, logits_multiplier=1.0)
    return replace(plain, attention=replace(model.attention, scale=None)), factors


def _factors(model: Model) -> Iterator[tuple[str, float]]:
    found = multipliers(model)
    yield "embed.weight", found.embedding
    # The norm, since tied embeddings are the head's weight too; there, it also undoes the embedding's factor.
    further = [f"layers.{number}.mtp.output_norm.weight" for number in range(model.layers, model.layers + model.depth)]
    for name in ("head.norm.weight", *further):
        yield name, found.logits / (found.embedding if model.tie_embeddings else 1)
    scores = 1.0 if found.scores is None else found.scores * math.sqrt(model.head_size)
    # A norm of queries undoes what is before it, and RoPE turns what comes after it.
    queries = ("q_norm.weight",) if model.qk_norm else ("q.weight", *(("q.bias",) if model.qkv_bias else ()))
    last = {
        "pre": ("attention.o", "mlp.down"),
        "post": ("attention_norm", "mlp_norm"),
        "both": ("attention_output_norm", "mlp_output_norm"),
    }[model.norm]
    for number in range(model.layers + model.depth):
        for name in queries:
            yield f"layers.{number}.attention.{name}", scores
        for name in last:
            yield f"layers.{number}.{name}.weight", found.branch
        if model.out_bias and model.norm == "pre":
            yield f"layers.{number}.attention.o.bias", found.branch
