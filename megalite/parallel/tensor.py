"""Tensor-parallel layers (Megatron-LM, arXiv 1909.08053) that call their collectives explicitly.

A parameter is a DTensor on the `tp` mesh, so FSDP2, clipping and checkpoints know its global shape and placement.
`forward` computes with the rank's own part, a plain tensor.

    t  tensor-parallel size
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalite.distributed.collectives import all_gather, reduce_scatter
from megalite.parallel.dropout import Dropout
from megalite.parallel.linear import WeightGradients, linears
from megalite.parallel.magnitudes import scaled_to_magnitudes
from megalite.parallel.parameter import joint_copy, parameter, part, whole
from megalite.parallel.product import PLAIN_PRODUCT, Product
from megalite.parallel.scattered import scattered_linear
from megalite.parallel.symmetric import prepare
from megalite.plan.parts.part import Weight
from megalite.plan.parts.pieces import pieces


class Linear(nn.Module):
    """A layer of matrix products. `gradients` collects the weight gradients that a split backward puts off.

    own_product: no other product serves it. symmetric: products are fused with collectives over tp.
    """

    own_product = False
    weight: nn.Parameter
    gradients: WeightGradients | None = None
    product: Product = PLAIN_PRODUCT
    symmetric = False

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.roles = {"weight": weight.role, "bias": weight.role.bias}
        self.bias: nn.Parameter | None = None
        self.lora_a: Linear | None = None  # an adapter's factors, whose product with `lora_scale` is added to `weight`
        self.lora_b: Linear | None = None
        self.lora_m: nn.Parameter | None = None  # added to the norms of the rows of `weight`, see `magnitudes`
        self.lora_scale = 1.0
        self.lora_dropout: Dropout | None = None
        self.beside_adapters = False  # whether this layer, or one that shares its input, may have an adapter


class ColumnLinear(Linear):
    """y = x Wᵀ + b, with output features, padded if they are a vocabulary, split over tp; see `columns`."""

    def __init__(self, weight: Weight, mesh: DeviceMesh, bias: Weight | None = None) -> None:
        super().__init__(weight)
        self.rows = weight.shape[0]
        self.weight = parameter(weight, mesh, Shard(0))
        self.bias = None if bias is None else parameter(bias, mesh, Shard(0))


def columns(x: Tensor, layers: Sequence[ColumnLinear], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The outputs of layers that share an input, and have biases all or none: `[s/t, b, in]` → `[s, b, out/t]` each."""
    first = layers[0]
    biases = () if first.bias is None else [part(layer.bias) for layer in layers]
    weights = [layer.weight for layer in layers]
    made = linears(x, weights, group, first.gradients, first.product, biases=biases, symmetric=first.symmetric)
    return with_adapters(made, x, layers, group) if first.beside_adapters else made


def columns_in_one(x: Tensor, layers: Sequence[ColumnLinear], group: dist.ProcessGroup) -> Tensor | None:
    """The outputs of `columns` in a compiled layer as one tensor, one behind the other: `[s/t, b, in]` → `[s, b, Σ]`.

    The compiler does not see whether gradients of parts lie side by side, so whoever takes this makes one gradient.
    None: the layers are not compiled, their weights have no copies that lie one after another, or outputs are theirs
    and those of adapters.
    """
    if not torch.compiler.is_compiling():
        return None
    first, weights = layers[0], [layer.weight for layer in layers]
    joint = joint_copy(weights)
    if joint is None or first.product is not PLAIN_PRODUCT or first.beside_adapters:
        return None
    return PLAIN_PRODUCT.forward((all_gather(x, group),), (joint.weight,), bias=joint.bias)


class CopiedLinear(Linear):
    """y = x Wᵀ, of which every rank has a copy of W, and computes its own part of the sequence; see `of_own_part`."""

    def __init__(self, weight: Weight, mesh: DeviceMesh) -> None:
        super().__init__(weight)
        self.weight = parameter(weight, mesh, Replicate())


def of_own_part(x: Tensor, layers: Sequence[CopiedLinear]) -> Sequence[Tensor]:
    """The outputs of layers that share an input: `[s/t, b, in]` → `[s/t, b, out]` each."""
    first = layers[0]
    made = linears(x, [layer.weight for layer in layers], None, first.gradients, first.product)
    return with_adapters(made, x, layers) if first.beside_adapters else made


class RowLinear(Linear):
    """y = factor · (x Wᵀ + b), the input features split over tp: `[s, b, in/t]` → `[s/t, b, out]`.

    A rank adds the bias to its part of the sequence, of which it makes a part of the bias's gradient.
    """

    def __init__(self, weight: Weight, mesh: DeviceMesh, factor: float = 1.0, bias: Weight | None = None) -> None:
        super().__init__(weight)
        self.factor = factor
        self.rows = weight.shape[0]
        self.weight = parameter(weight, mesh, Shard(1))
        self.bias = None if bias is None else parameter(bias, mesh, Replicate())
        self.group: dist.ProcessGroup = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        # First, so that full recompute, which ends with what is kept, scatters y only once.
        added = self._of_adapter(x) if self.beside_adapters else None
        y = self._product(x)
        if added is not None:
            y = to_magnitudes(y.add_(added), self, self.group)
        if self.bias is None:
            return y
        bias = whole(self.bias)
        return y + (bias if self.factor == 1 else bias * self.factor)

    def _of_adapter(self, x: Tensor) -> Tensor | None:
        if self.lora_a is None:
            return None
        seen = x if self.lora_dropout is None else self.lora_dropout(x)
        return second_factor(self, self.lora_a(seen), self.lora_scale * self.factor)

    def _product(self, x: Tensor) -> Tensor:
        n = self._pieces(x)
        if n != 1:
            assert isinstance(self.weight, DTensor)
            return scattered_linear(x, self.weight, self.group, self.gradients, self.factor, n)
        (y,) = linears(x, [self.weight], None, self.gradients, self.product, self.factor)
        return reduce_scatter(y, self.group)

    def _pieces(self, x: Tensor) -> int | None:
        """Number of pieces in which the output is scattered: 1 where others overlap, or for products of other kinds;
        None: `symmetric` scatters it."""
        ranks = self.group.size()
        whole = torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.product is not PLAIN_PRODUCT
        if whole or ranks == 1:
            return 1
        return None if self.symmetric else pieces(len(x) // ranks, x.nbytes // x.shape[-1] * self.rows)


def with_adapters(
    outputs: Sequence[Tensor], x: Tensor, layers: Sequence[Linear], group: dist.ProcessGroup | None = None
) -> Sequence[Tensor]:
    """Add what adapters make of `x` `[s/t, b, in]` to the `outputs` of layers, in place.

    A rank computes the first factors, of which all have copies, for its part of the sequence; their few features are
    gathered over `group`, as the second factors are split like the layers. None: layers are not split.
    """
    adapted = [(y, layer) for y, layer in zip(outputs, layers, strict=True) if layer.lora_a is not None]
    if not adapted:
        return outputs
    first = adapted[0][1]
    factors = [layer.lora_a.weight for _, layer in adapted if layer.lora_a is not None]
    if first.lora_dropout is None:
        between = linears(x, factors, None, first.gradients, first.product)  # s/t b r
    else:  # each sees other features
        seen = [layer.lora_dropout(x) for _, layer in adapted if layer.lora_dropout is not None]
        pairs = zip(seen, factors, strict=True)
        between = [linears(each, [factor], None, first.gradients, first.product)[0] for each, factor in pairs]
    if group is not None and group.size() > 1:
        between = all_gather(torch.cat(list(between), -1), group).split([z.shape[-1] for z in between], -1)  # s b r
    for (y, layer), z in zip(adapted, between, strict=True):
        y += second_factor(layer, z, layer.lora_scale)
    if first.lora_m is None:
        return outputs
    return [to_magnitudes(y, layer, bias=layer.bias) for y, layer in zip(outputs, layers, strict=True)]


def to_magnitudes(
    y: Tensor, layer: Linear, group: dist.ProcessGroup | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the output of a layer and its adapter, scaled to the norms that the adapter trains, if it does.

    group: ranks that have other inputs of the matrix. bias: a parameter that y has, and that is not scaled.
    """
    if layer.lora_m is None or layer.lora_a is None or layer.lora_b is None:
        return y
    matrix = layer.weight, layer.lora_a.weight, layer.lora_b.weight
    return scaled_to_magnitudes(y, layer.lora_m, matrix, layer.lora_scale, group, bias)


def second_factor(layer: Linear, between: Tensor, scale: float, product: Product | None = None) -> Tensor:
    """Return what the adapter of `layer` adds to its output, by its own product or by `product`.

    between: `[…, r]`, outputs of the first factor.
    """
    assert layer.lora_b is not None
    (y,) = linears(between, [layer.lora_b.weight], None, layer.gradients, product or layer.product, scale)
    return y


class VocabularyEmbedding(nn.Module):
    """An embedding table split by vocabulary, which is padded: tokens `[s, b]` → `[s/t, b, d]`.

    If the table is not trained, its output still takes a gradient: every layer then runs backward alike. An adapter's
    second factor is such a table, too.
    """

    def __init__(self, weight: Weight, mesh: DeviceMesh) -> None:
        super().__init__()
        self.roles = {"weight": weight.role}
        self.rows = weight.shape[0]
        self.weight = parameter(weight, mesh, Shard(0))
        self.group: dist.ProcessGroup = mesh.get_group()
        self.lora_a: CopiedLinear | None = None
        self.lora_b: VocabularyEmbedding | None = None
        self.lora_scale = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.lora_a is not None and self.lora_b is not None:
            first = whole(self.lora_a.weight)  # r d
            return torch.add(self._looked_up(tokens), self.lora_b(tokens) @ first, alpha=self.lora_scale)
        if self.weight.requires_grad or not torch.is_grad_enabled():
            return self._looked_up(tokens)
        return _TakesGradient.apply(torch.empty(0, device=tokens.device, requires_grad=True), self._looked_up, tokens)

    def _looked_up(self, tokens: Tensor) -> Tensor:
        table = part(self.weight)
        if self.group.size() == 1:
            return F.embedding(tokens, table)
        local = tokens - self.group.rank() * len(table)
        absent = (local < 0) | (local >= len(table))
        found = F.embedding(local.masked_fill(absent, 0), table).masked_fill(absent[..., None], 0)  # s b d
        return reduce_scatter(found, self.group)


class _TakesGradient(torch.autograd.Function):
    """`make(x)`, which takes a gradient though nothing in it is trained. leaf: any tensor that requires one."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return make(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        return None, None, None


def use_product(layers: nn.Module, product: Product) -> None:
    """Have all of `layers` but those with an own product compute their matrix products by `product`."""
    for module in layers.modules():
        if isinstance(module, Linear) and not module.own_product:
            module.product = product


def use_symmetric(layers: nn.Module) -> None:
    """Have all of `layers` fuse their matrix products with collectives, where PyTorch's operations can."""
    prepare()
    for module in layers.modules():
        if isinstance(module, Linear):
            module.symmetric = True


def split_backward(stage: nn.Module) -> WeightGradients:
    """Give the layers of `stage` an object that can make them put off weight gradients. Returns that object."""
    gradients = WeightGradients()
    for module in stage.modules():
        if isinstance(module, Linear):
            module.gradients = gradients
    return gradients
