"""What every layer of a model is. All who look at layers read it from here, so layers may differ."""

from dataclasses import dataclass

from megalite.config.schema import Model


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU (arXiv 2002.05202) with a hidden width."""

    width: int


@dataclass(frozen=True)
class LayerKind:
    """What a layer is. Layers of equal kind differ in nothing but their weights."""

    feed_forward: FeedForward


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """The kind of every layer of `model`, first to last."""
    kind = LayerKind(FeedForward(model.ffn))
    return (kind,) * model.layers
