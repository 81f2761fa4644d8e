"""Matrix products of layers in 8-bit floating point: `train.precision: fp8`.

Activations and weights are in e4m3, gradients in e5m2, and results in the layers' data type. A tensor has one scale,
which follows from its largest absolute value over all ranks that hold parts of the tensor: over tp, and for activations
and gradients over cp as well. So a micro-batch has the same scales in every layout; replicas, whose
micro-batches are others, have their own.

Hopper multiplies a row-major matrix with a column-major one alone:

    y  = x Wᵀ    x by rows, W by rows        sums of 14 bits, which are faster, as results are activations again
    dx = g W     g by rows, W by columns     sums in float32
    dW = gᵀ x    g by columns, x by columns  sums in float32

An input is cast once, kept, and gathered over tp in 8 bits; its transposed copy is made in backward. A gradient is cast
to both layouts in one pass. So is a weight, once a step where weights stay gathered, and otherwise for every use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.base.errors import InputError, Problem
from megalite.distributed.mesh import Mesh
from megalite.parallel.product import Prepared
from megalite.parallel.tensor import ColumnLinear, Linear
from megalite_kernels.backend import wide_dtype
from megalite_kernels.float8 import ACTIVATION, GRADIENT, amax, cast, scale_for, transpose

CAPABILITY = (8, 9)  # the least compute capability with products in 8 bits

Groups = Sequence[dist.ProcessGroup]


class WeightCasts:
    """The weights of a rank in 8 bits, while they are known to stay as they are."""

    def __init__(self, held: bool) -> None:
        """held: False where gathered weights are freed after every use, and copies of all of them would stay."""
        self._held = held
        self._casts: dict[int, tuple[Tensor, Prepared]] | None = None  # by identity of the weight, which is kept alive

    @contextmanager
    def once(self) -> Iterator[None]:
        """Inside, where no weight may change, every weight is cast once."""
        self._casts = {} if self._held else None
        try:
            yield
        finally:
            self._casts = None

    def find(self, weight: Tensor) -> Prepared | None:
        """The casts of a weight, if there are any yet."""
        found = (self._casts or {}).get(id(weight))
        return None if found is None else found[1]

    def put(self, weight: Tensor, casts: Prepared) -> None:
        assert self._casts is not None
        self._casts[id(weight)] = weight, casts

    @property
    def keeps(self) -> bool:
        """Flag: casts can be put here now."""
        return self._casts is not None


class Float8:
    """Products in 8 bits, with one scale for each tensor.

    dtype: of results; PyTorch's product in 8 bits makes bfloat16, and for others the same numbers are multiplied in
    that type. inputs, outputs, weights: the groups whose ranks hold parts of a layer's input, of its output's gradient,
    and of its weight.
    """

    def __init__(
        self, dtype: torch.dtype, casts: WeightCasts, inputs: Groups = (), outputs: Groups = (), weights: Groups = ()
    ) -> None:
        self.dtype, self.casts = dtype, casts
        self._inputs, self._outputs, self._weights = inputs, outputs, weights

    def prepare(self, x: Tensor) -> Prepared:
        """x by rows, as bytes, which every collective can send, and the inverse of its scale."""
        if torch.compiler.is_compiling():
            return (x,)  # autograd must find the input; the compiler casts once what it is asked to cast thrice
        rows, inverse = self._cast(x, ACTIVATION, self._inputs, by_rows=True)
        return rows.view(torch.uint8).unflatten(0, x.shape[:-1]), inverse

    def prepare_weight(self, weight: Tensor, part: Tensor) -> Prepared:
        """Both layouts of the weight, and the inverse of its scale; or the weight, to be cast when it is used."""
        if torch.compiler.is_compiling() or not self.casts.keeps:
            return (part,)
        if (found := self.casts.find(weight)) is None:
            found = self._cast(part, ACTIVATION, self._weights, by_rows=True, by_columns=True)
            self.casts.put(weight, found)
        return found

    def prepare_gradient(self, grad: Tensor) -> Prepared:
        rows, columns, inverse = self._cast(grad, GRADIENT, self._outputs, by_rows=True, by_columns=True)
        return rows.unflatten(0, grad.shape[:-1]), columns, inverse

    def prepare_kept(self, x: Prepared) -> Prepared:
        rows, inverse = x
        return transpose(rows.flatten(0, -2)).view(ACTIVATION), inverse

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0) -> Tensor:
        if torch.compiler.is_compiling():
            return _Traced.apply(*x, *weight, self, factor)
        rows, inverse = x
        w, of_w = self._layout(weight, by_columns=False)
        y = self._product(rows.view(ACTIVATION).flatten(0, -2), w, inverse, of_w, factor, fast=True)
        return y.unflatten(0, rows.shape[:-1])

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        rows, _, inverse = grad
        w, of_w = self._layout(weight, by_columns=True)
        found = self._product(rows.flatten(0, -2), w, inverse, of_w, factor).unflatten(0, rows.shape[:-1])
        return found if total is None else total.add_(found)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        _, of_output, inverse = grad
        return self._product(of_output, x[0], inverse, x[1], factor)

    def _cast(
        self, x: Tensor, dtype: torch.dtype, groups: Groups, by_rows: bool = False, by_columns: bool = False
    ) -> tuple[Tensor, ...]:
        """The asked for layouts of a tensor as a matrix, and the inverse of its scale."""
        scale = scale_for(_over(groups, amax(x)), dtype)
        return *cast(x.detach().flatten(0, -2), scale, dtype, by_rows, by_columns), scale.reciprocal()

    def _layout(self, weight: Prepared, by_columns: bool) -> tuple[Tensor, ...]:
        """One layout of a weight, and the inverse of its scale."""
        if len(weight) == 1:
            return self._cast(weight[0], ACTIVATION, self._weights, by_rows=not by_columns, by_columns=by_columns)
        rows, columns, inverse = weight
        return (columns if by_columns else rows), inverse

    def _product(self, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, factor: float, fast: bool = False) -> Tensor:
        """factor · a bᵀ for matrices by rows. of_a, of_b: inverses of their scales."""
        if self.dtype == torch.bfloat16:
            scale = of_a if factor == 1 else of_a * factor
            return torch._scaled_mm(a, b.t(), scale, of_b, out_dtype=self.dtype, use_fast_accum=fast)
        wide = wide_dtype(self.dtype)
        return (a.to(wide) @ b.to(wide).t() * ((of_a.to(wide) * of_b.to(wide)) * factor)).to(self.dtype)


class _Traced(torch.autograd.Function):
    """A product and its gradients in a form that the compiler can trace, of a 16-bit input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Float8, factor: float) -> Tensor:
        rows, inverse = product._cast(x, ACTIVATION, product._inputs, by_rows=True)
        w, of_w = product._layout((weight,), by_columns=False)
        ctx.save_for_backward(rows, inverse, weight)
        ctx.product, ctx.factor = product, factor
        return product._product(rows, w, inverse, of_w, factor, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, inverse, weight = ctx.saved_tensors
        product, factor = ctx.product, ctx.factor
        prepared = product.prepare_gradient(grad)
        of_weight = product.weight_gradient(prepared, (transpose(rows), inverse), factor)
        return product.input_gradient(prepared, (weight,), None, factor), of_weight, None, None


def _over(groups: Groups, largest: Tensor) -> Tensor:
    """The largest of the numbers that the ranks of all groups have."""
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest


def check_float8(device: torch.device) -> None:
    """Raises InputError for a GPU without products in 8 bits."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (CAPABILITY, found))
        rule = f"needs GPUs of compute capability {least} or later, and this is {has}"
        raise InputError([Problem("train.precision", rule, "use bf16", "fp8")])


def use_float8(layers: nn.Module, wide: Sequence[str], dtype: torch.dtype, mesh: Mesh, casts: WeightCasts) -> None:
    """Have `layers` compute their matrix products in 8 bits, except for those named in `wide`."""
    tp, cp = [[group] if group is not None and group.size() > 1 else [] for group in (mesh.group("tp"), mesh.cp)]
    column = Float8(dtype, casts, inputs=tp + cp, outputs=tp + cp, weights=tp)
    row = Float8(dtype, casts, inputs=tp + cp, outputs=cp, weights=tp)  # gradients are gathered: alike on all of tp
    for name, module in layers.named_modules():
        if isinstance(module, Linear) and name not in wide:
            module.product = column if isinstance(module, ColumnLinear) else row
