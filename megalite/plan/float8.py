"""The weights of layers that are multiplied in 8 bits, where `train.precision` is fp8."""

from collections.abc import Iterator

from megalite.base.errors import number_ranges
from megalite.config.layers import layer_kinds
from megalite.config.schema import Config
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Part
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.sizes import Sizes


def wide_weights(config: Config) -> list[str]:
    """The layers' matrices that stay in bf16, as `7.mlp.down`: a rank's part has a size that is no `Sizes.multiple`.

    Matrices that share an input are all in 8 bits, or none of them. None without fp8.
    """
    if config.train.precision != "fp8":
        return []
    kinds = [Layer(config.model.width, kind) for kind in layer_kinds(config.model)]
    return [
        f"{number}.{part.name}.{name}"
        for number, layer in enumerate(kinds)
        for part in layer.parts
        for name in _wide(part, Sizes(config))
    ]


def float8_text(config: Config) -> str:
    """Say which matrix products are in 8 bits, and which weights of layers are not; "" without fp8."""
    if config.train.precision != "fp8":
        return ""
    found: dict[str, list[int]] = {}
    kinds = layer_kinds(config.model)
    for weight in wide_weights(config):
        layer, _, name = weight.partition(".")
        if not (name.startswith("mlp.") and kinds[int(layer)].mixture is not None):
            found.setdefault(name, []).append(int(layer))
    told = f"fp8 with {config.train.float8_recipe} scales: the matrix products of layers; all else is in bf16"
    told += ", and so are experts and routers" if config.model.experts is not None else ""
    if not found:
        return f"{told}."
    left = "; ".join(f"{name} of layers {number_ranges(layers)}" for name, layers in found.items())
    return f"{told}. No multiples of {Sizes(config).multiple} on a rank, so also in bf16: {left}."


def _wide(part: Part, sizes: Sizes) -> Iterator[str]:
    """The names of a part's matrices that stay in bf16."""
    for into_stream in (False, True):
        if not sizes.in_8_bits(part.weights(), into_stream):
            matrices = ((name, weight.role) for name, weight in part.weights() if weight.role.kind is RoleKind.MATRIX)
            yield from (name.removesuffix(".weight") for name, role in matrices if role.into_stream == into_stream)
