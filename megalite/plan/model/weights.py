"""Name, shape and role of every weight of a model, without building it."""

from collections.abc import Iterator

from megalite.config.layers import Adapter, LayerKind, adapter_of, layer_kinds
from megalite.config.model_schema import Model
from megalite.plan.parts import roles
from megalite.plan.parts.adapted import beside
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Weight


def weights(model: Model) -> dict[str, Weight]:
    """All weights by global name; a head that uses the embedding's weight has none of its own."""
    found = embedding_weights(model)
    for number, kind in enumerate(layer_kinds(model)):
        found |= {f"layers.{number}.{name}": weight for name, weight in layer_weights(model, kind)}
    return {**found, **{f"head.{name}": weight for name, weight in head_weights(model).items()}}


def held_weights(model: Model) -> dict[str, Weight]:
    """The weights that checkpoints of `model` hold, by global name: all, or an adapter's factors alone."""
    found = weights(model)
    return found if model.adapter is None else {name: each for name, each in found.items() if each.role.adapts}


def embedding_weights(model: Model) -> dict[str, Weight]:
    """The embedding's table, and the factors of an adapter of it, by global name."""
    name, table = "embed.weight", embedding(model)
    return {name: table, **dict(beside(name, table, _adapter(model)))}


def head_weights(model: Model) -> dict[str, Weight]:
    """The weights of the head, each with its name inside of it; a tied matrix is the embedding's."""
    norm, (name, matrix) = {"norm.weight": final_norm(model)}, ("output.weight", head(model))
    return norm if model.tie_embeddings else {**norm, name: matrix, **dict(beside(name, matrix, _adapter(model)))}


def _adapter(model: Model) -> Adapter | None:
    return None if model.adapter is None else adapter_of(model.adapter)


def embedding(model: Model) -> Weight:
    return Weight((model.vocab_size, model.width), roles.EMBEDDING, model.adapter is None)


def final_norm(model: Model) -> Weight:
    return Weight((model.width,), roles.FINAL_NORM, model.adapter is None)


def head(model: Model) -> Weight:
    return Weight((model.vocab_size, model.width), roles.HEAD, model.adapter is None)


def layer_weights(model: Model, kind: LayerKind) -> Iterator[tuple[str, Weight]]:
    """The weights of a layer, each with its name inside of the layer."""
    return Layer(model.width, kind).weights()
