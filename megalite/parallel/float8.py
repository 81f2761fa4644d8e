"""Matrix products of layers in 8-bit floating point: `train.precision: fp8`.

Results are in the layers' data type, but weight gradients that are added to float32 sums. A scale follows from the
largest absolute value of what it is for: a whole tensor, a row or a column of a matrix, or 32 numbers of one. Ranks
that hold parts of that find it together: over tp, and for activations and gradients over cp as well. So a micro-batch
has the same scales in every layout; replicas, whose micro-batches are others, have their own.

Hopper multiplies a row-major matrix with a column-major one alone:

    y  = x Wᵀ    x by rows, W by rows        sums of 14 bits, which are faster, as results are activations again
    dx = g W     g by rows, W by columns     sums in float32
    dW = gᵀ x    g by columns, x by columns  sums in float32

An input is cast once, kept, and gathered over tp in 8 bits; its transposed copy is made in backward. A gradient is cast
to both layouts in one pass. So is a weight, once a step where weights stay gathered, and otherwise for every use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megalite.base.errors import InputError, Problem
from megalite.distributed.mesh import Mesh
from megalite.parallel.product import Prepared, add_rounded, sum_over_tokens
from megalite.parallel.tensor import ColumnLinear, Linear
from megalite_kernels import mxfp8
from megalite_kernels.backend import times, wide_dtype
from megalite_kernels.float8 import ACTIVATION, GRADIENT, amax, cast, scale_for, transpose
from megalite_kernels.products import has_gpu_products

CAPABILITY = (8, 9)  # the least compute capability with products in 8 bits
CAPABILITY_OF_BLOCKS = (10, 0)  # and with scales of 32 numbers
CPU_SCALES_ROWS = torch.__version__ >= "2.12"  # PyTorch's product in 8 bits takes a scale for every row on CPUs, too

Groups = Sequence[dist.ProcessGroup]


class Spread(NamedTuple):
    """Spread of a matrix: the groups whose ranks have other rows of it, and those whose have other columns."""

    rows: Groups = ()
    columns: Groups = ()


NOT_SPREAD = Spread()


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
    """Products in 8 bits, with one scale for each tensor: activations and weights in e4m3, gradients in e5m2.

    dtype: of results; PyTorch's product in 8 bits makes bfloat16, and for others the same numbers are multiplied in
    that type. inputs, gathered, outputs, weights: how a layer's input is spread, before it is gathered and then; its
    output's gradient; and its weight.
    """

    gradient = GRADIENT
    makes_float32 = True  # PyTorch's product with one scale does

    def __init__(
        self,
        dtype: torch.dtype,
        casts: WeightCasts,
        inputs: Spread = NOT_SPREAD,
        gathered: Spread = NOT_SPREAD,
        outputs: Spread = NOT_SPREAD,
        weights: Spread = NOT_SPREAD,
    ) -> None:
        self.dtype, self.casts = dtype, casts
        self._inputs, self._gathered, self._outputs, self._weights = inputs, gathered, outputs, weights

    def prepare(self, x: Tensor) -> Prepared:
        """x by rows, as bytes, which every collective can send, and the inverses of its scales."""
        if torch.compiler.is_compiling():
            return (x,)  # autograd must find the input; the compiler casts once what it is asked to cast thrice
        rows, inverse = self._cast(x, ACTIVATION, self._inputs, by_rows=True)
        of_rows = inverse.unflatten(0, x.shape[:-1]) if inverse.ndim else inverse
        return rows.view(torch.uint8).unflatten(0, x.shape[:-1]), of_rows

    def prepare_weight(self, weight: Tensor, part: Tensor) -> Prepared:
        """Both layouts of the weight, with the inverses of their scales; or the weight, to be cast when it is used."""
        if torch.compiler.is_compiling() or not self.casts.keeps:
            return (part,)
        if (found := self.casts.find(weight)) is None:
            found = self._cast(part, ACTIVATION, self._weights, by_rows=True, by_columns=True)
            self.casts.put(weight, found)
        return found

    def prepare_gradient(self, grad: Tensor) -> Prepared:
        rows, *others = self._cast(grad, self.gradient, self._outputs, by_rows=True, by_columns=True)
        return rows.unflatten(0, grad.shape[:-1]), *others

    def prepare_kept(self, x: Prepared) -> Prepared:
        rows, inverse = x
        return transpose(rows.flatten(0, -2)).view(ACTIVATION), inverse

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return _Traced.apply(*x, *weight, bias, self, factor)
        rows, inverse = x
        of_rows = inverse.flatten(0, -2) if inverse.ndim else inverse
        w, of_w = self._layout(weight, by_columns=False)
        y = self._product(rows.view(ACTIVATION).flatten(0, -2), w, of_rows, of_w, factor, fast=True, bias=bias)
        return y.unflatten(0, rows.shape[:-1])

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        rows, inverse, _, _ = grad
        w, of_w = self._layout(weight, by_columns=True)
        found = self._product(rows.flatten(0, -2), w, inverse, of_w, factor).unflatten(0, rows.shape[:-1])
        return found if total is None else total.add_(found)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        _, _, of_output, inverse = grad
        return self._product(of_output, x[0], inverse, x[1], factor)

    def add_weight_gradient(
        self, total: Tensor, has_values: bool, grad: Prepared, x: Prepared, factor: float = 1.0
    ) -> None:
        """Add gradᵀ x to `total`, or put it there if `total` has no values yet; rounded first if a product must."""
        if not (self.makes_float32 and self._on_gpu(total)):
            add_rounded(total, has_values, self.weight_gradient(grad, x, factor))
            return
        _, _, of_output, inverse = grad
        made = self._product(
            of_output, x[0], inverse, x[1], factor, out=torch.empty_like(total) if has_values else total
        )
        if has_values:
            total.add_(made)

    def _cast(
        self, x: Tensor, dtype: torch.dtype, spread: Spread, by_rows: bool = False, by_columns: bool = False
    ) -> tuple[Tensor, ...]:
        """The asked for layouts of a tensor as a matrix, each with the inverses of its scales, one for a row of it."""
        x = x.detach().flatten(0, -2)
        of_rows, of_columns = self._scales(x, dtype, spread, by_rows, by_columns)
        inverses = [scale.reciprocal() for scale in (of_rows, of_columns) if scale is not None]
        pairs = zip(cast(x, dtype, of_rows, of_columns), inverses, strict=True)
        return tuple(
            each for cast_, inverse in pairs for each in (cast_, inverse.view(-1, 1) if inverse.ndim else inverse)
        )

    def _scales(
        self, x: Tensor, dtype: torch.dtype, spread: Spread, by_rows: bool, by_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scales of a matrix by rows and by columns; None for what is not asked for."""
        scale = scale_for(_over([*spread.rows, *spread.columns], amax(x)), dtype)
        return scale if by_rows else None, scale if by_columns else None

    def _on_gpu(self, x: Tensor) -> bool:
        """Return whether a GPU multiplies in 8 bits, as it does for results of bfloat16."""
        return self.dtype == torch.bfloat16 and has_gpu_products(x)

    def _layout(self, weight: Prepared, by_columns: bool) -> tuple[Tensor, ...]:
        """One layout of a weight, and the inverses of its scales."""
        if len(weight) == 1:
            return self._cast(weight[0], ACTIVATION, self._weights, by_rows=not by_columns, by_columns=by_columns)
        return weight[2:] if by_columns else weight[:2]

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        of_a: Tensor,
        of_b: Tensor,
        factor: float,
        fast: bool = False,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """factor · a bᵀ + bias for matrices by rows.

        of_a, of_b: inverses of their scales. out: takes the result of products of bfloat16, in its own data type.
        """
        if self.dtype == torch.bfloat16 and (of_a.numel() == 1 or CPU_SCALES_ROWS or has_gpu_products(a)):
            scale, dtype = of_a if factor == 1 else of_a * factor, self.dtype if out is None else out.dtype
            return torch._scaled_mm(a, b.t(), scale, of_b.t(), bias, out_dtype=dtype, use_fast_accum=fast, out=out)
        assert out is None
        wide = wide_dtype(self.dtype)
        made = a.to(wide) @ b.to(wide).t() * ((of_a.to(wide) * of_b.to(wide).t()) * factor)
        return (made if bias is None else made + bias).to(self.dtype)


class RowwiseFloat8(Float8):
    """Products in 8 bits, with a scale for each row of the first operand and each column of the second; all in e4m3.

    So a matrix has other scales by rows than by columns. A kept input, which is by rows, is cast by columns from what
    it has become: as scales are powers of 2, this rounds no number again but those that are small in their column.
    """

    gradient = ACTIVATION  # a row needs fewer exponents than a tensor
    makes_float32 = False

    def prepare_kept(self, x: Prepared) -> Prepared:
        rows, inverse = (each.flatten(0, -2) for each in x)
        exact = rows.view(ACTIVATION).to(torch.bfloat16).mul_(inverse)
        return self._cast(exact, ACTIVATION, self._gathered, by_columns=True)

    def _scales(
        self, x: Tensor, dtype: torch.dtype, spread: Spread, by_rows: bool, by_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        of_rows = scale_for(_over(spread.columns, amax(x, -1)), dtype) if by_rows else None
        return of_rows, scale_for(_over(spread.rows, amax(x, 0)), dtype) if by_columns else None


class MxFloat8(Float8):
    """Products in 8 bits, with a scale for every 32 numbers of what a product sums over; all in e4m3.

    No block of 32 may be on two ranks, so none of them asks another for its scales. They are bytes: of an input by
    rows, which ranks gather, as a matrix; all others as GPUs read them, where a GPU multiplies. A kept input is cast by
    columns from what it has become, as rows with scales are: only numbers 2¹⁴ times smaller than the largest of their
    32 are rounded again.
    """

    gradient = ACTIVATION  # 32 numbers need fewer exponents than a tensor

    def prepare_kept(self, x: Prepared) -> Prepared:
        rows, scales = (each.flatten(0, -2) for each in x)
        in_tiles = self._on_gpu(rows)
        return tuple(mxfp8.cast(rows.view(ACTIVATION), scales, by_columns=True, in_tiles=in_tiles))

    def _cast(
        self, x: Tensor, dtype: torch.dtype, spread: Spread, by_rows: bool = False, by_columns: bool = False
    ) -> tuple[Tensor, ...]:
        x, in_tiles = x.detach().flatten(0, -2), by_columns and self._on_gpu(x)
        return tuple(mxfp8.cast(x, by_rows=by_rows, by_columns=by_columns, in_tiles=in_tiles))

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        of_a: Tensor,
        of_b: Tensor,
        factor: float,
        fast: bool = False,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """factor · a bᵀ + bias for matrices by rows. No scale can take the factor, which has a pass of its own.

        of_a, of_b: their scales. out: takes the result of products of bfloat16, in its own data type.
        """
        if self._on_gpu(a):
            of_a, of_b = (
                (each if each.ndim == 1 else mxfp8.tiled(each)).view(torch.float8_e8m0fnu) for each in (of_a, of_b)
            )
            dtype, added = self.dtype if out is None else out.dtype, bias if factor == 1 else None
            made: Tensor
            if isinstance(out, FakeTensor):  # without data, there is nothing to multiply
                made = out
            else:
                made = torch._scaled_mm(a, b.t(), of_a, of_b, added, out_dtype=dtype, out=out)
            if factor == 1:
                return made
            made = times(made, factor)
        else:
            assert out is None
            wide = wide_dtype(self.dtype)
            made = mxfp8.wide(a, of_a).to(wide) @ mxfp8.wide(b, of_b).to(wide).t() * factor
        return (made if bias is None else made + bias).to(self.dtype if out is None else out.dtype)


RECIPES = {"tensorwise": Float8, "rowwise": RowwiseFloat8, "mx": MxFloat8}  # by train.float8_recipe


class _Traced(torch.autograd.Function):
    """A product and its gradients in a form that the compiler can trace, of a 16-bit input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Float8, factor: float) -> Tensor:
        rows, inverse = product._cast(x, ACTIVATION, product._inputs, by_rows=True)
        w, of_w = product._layout((weight,), by_columns=False)
        ctx.save_for_backward(rows, inverse, weight)
        ctx.product, ctx.factor = product, factor
        return product._product(rows, w, inverse, of_w, factor, fast=True, bias=bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse, weight = ctx.saved_tensors
        product, factor = ctx.product, ctx.factor
        prepared = product.prepare_gradient(grad)
        of_weight = product.weight_gradient(prepared, product.prepare_kept((rows, inverse)), factor)
        of_bias = sum_over_tokens(grad) if ctx.needs_input_grad[2] else None
        return product.input_gradient(prepared, (weight,), None, factor), of_weight, of_bias, None, None


def _over(groups: Groups, largest: Tensor) -> Tensor:
    """The largest of the numbers that the ranks of all groups have."""
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest


def check_float8(device: torch.device, recipe: str = "tensorwise") -> None:
    """Raises InputError for a GPU without products in 8 bits, or without those of the recipe."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    of_recipe = CAPABILITY_OF_BLOCKS if recipe == "mx" else CAPABILITY
    for least, key, fix, value in (
        (CAPABILITY, "train.precision", "use bf16", "fp8"),
        (of_recipe, "train.float8_recipe", "use tensorwise or rowwise", recipe),
    ):
        if found < least:
            rule = f"needs GPUs of compute capability {_version(least)} or later, and this is {_version(found)}"
            raise InputError([Problem(key, rule, fix, value)])


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def use_float8(
    layers: nn.Module,
    wide: Sequence[str],
    dtype: torch.dtype,
    mesh: Mesh,
    casts: WeightCasts,
    recipe: str = "tensorwise",
) -> None:
    """Have `layers` compute their matrix products in 8 bits, except for those named in `wide`."""
    tp, cp = [[group] if group is not None and group.size() > 1 else [] for group in (mesh.group("tp"), mesh.cp)]
    product, tokens = RECIPES[recipe], Spread(rows=cp)
    column = product(dtype, casts, Spread(rows=tp + cp), tokens, Spread(cp, tp), Spread(rows=tp))
    row = product(dtype, casts, Spread(cp, tp), Spread(cp, tp), tokens, Spread(columns=tp))  # gradients are gathered
    for name, module in layers.named_modules():
        if isinstance(module, Linear) and name not in wide:
            module.product = column if isinstance(module, ColumnLinear) else row
