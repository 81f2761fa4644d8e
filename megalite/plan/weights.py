"""Name, shape and role of every weight of a model, without building it."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.schema import Model
from megalite.plan import roles
from megalite.plan.roles import Role


@dataclass(frozen=True)
class Weight:
    """A parameter of the model."""

    shape: tuple[int, ...]
    role: Role

    @property
    def elements(self) -> int:
        return prod(self.shape)


def part_of(weight: Weight, tp: int) -> tuple[int, ...]:
    """The shape of a tensor-parallel rank's part of a weight, with padding where tp does not divide the vocabulary."""
    if not weight.role.split:
        return weight.shape
    rows, *others = weight.shape
    return (rows, others[0] // tp) if weight.role.into_stream else (-(-rows // tp), *others)


def weights(model: Model) -> dict[str, Weight]:
    """All weights by global name; a head that uses the embedding's weight has none of its own."""
    found = {"embed.weight": embedding(model)}
    for number, kind in enumerate(layer_kinds(model)):
        found |= {f"layers.{number}.{name}": weight for name, weight in layer_weights(model, kind)}
    found["head.norm.weight"] = final_norm(model)
    return found if model.tie_embeddings else {**found, "head.output.weight": head(model)}


def embedding(model: Model) -> Weight:
    return Weight((model.vocab_size, model.width), roles.EMBEDDING)


def final_norm(model: Model) -> Weight:
    return Weight((model.width,), roles.FINAL_NORM)


def head(model: Model) -> Weight:
    return Weight((model.vocab_size, model.width), roles.HEAD)


def layer_weights(model: Model, kind: LayerKind) -> Iterator[tuple[str, Weight]]:
    """The weights of a layer, each with its name inside of the layer."""
    width, ffn = model.width, kind.feed_forward.width
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    projections = (("q", queries, roles.QUERY), ("k", keys, roles.KEY), ("v", keys, roles.VALUE))
    for name, size, role in projections:
        yield f"attention.{name}.weight", Weight((size, width), role)
        if model.qkv_bias:
            yield f"attention.{name}.bias", Weight((size,), role.bias)
    yield "attention.o.weight", Weight((width, queries), roles.ATTENTION_OUTPUT)
    one, together = Weight((model.head_size,), roles.HEAD_NORM), model.qk_norm_width == "all"
    if model.qk_norm:
        yield "attention.q_norm.weight", Weight((queries,), roles.QUERY_NORM) if together else one
        yield "attention.k_norm.weight", Weight((keys,), roles.KEY_NORM) if together else one
    for name in ("attention_norm", "mlp_norm"):
        yield f"{name}.weight", Weight((width,), roles.NORM)
    for name, role in (("gate", roles.GATE), ("up", roles.UP)):
        yield f"mlp.{name}.weight", Weight((ffn, width), role)
    yield "mlp.down.weight", Weight((width, ffn), roles.DOWN)
