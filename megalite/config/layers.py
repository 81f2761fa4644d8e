"""The kinds of a model's layers. All code that looks at layers reads them here, so layers may differ."""

from dataclasses import dataclass

from megalite.config.schema import Model


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU (arXiv 2002.05202) with a hidden width."""

    width: int


@dataclass(frozen=True)
class LayerKind:
    """What a layer is made of. Layers of equal kind differ in nothing but their weights."""

    feed_forward: FeedForward


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """The kind of every layer of `model`, first to last."""
    kind = LayerKind(FeedForward(model.ffn))
    return (kind,) * model.layers
