"""Tokens brought to their experts and back, and matrix products of which every row has the weight of its expert.

Rows are tokens, once for each of their experts, in the order of experts, and of tokens where the expert is the same. So
an expert's rows are a run, and a product with its weight is one of matrices. Rows that come back are added up in the
order in which a token chose its experts.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.product import Plain, Prepared
from megalite_kernels import collect_rows, spread_rows
from megalite_kernels.backend import Backend, wide_dtype
from megalite_kernels.products import add_product

ALIGNED_BYTES = 16  # a row's of an operand of a grouped product
BLOCK = 1 << 20  # elements of rows to which biases are added at a time


class Rows:
    """The order of rows for the `experts` `[…, K]` that tokens `[…]` have chosen, of `count`.

    counts: by expert, its rows, where the host knows them; None: the host waits for them if it has to. backend: of
    `spread_rows` and `collect_rows`. room: rows that are made where choices of the number `count` have none: as many as
    there can be, so what lies behind the last expert's is anything; None: as many as choices.
    """

    def __init__(
        self,
        experts: Tensor,
        count: int,
        counts: Sequence[int] | None = None,
        backend: Backend = "auto",
        room: int | None = None,
    ) -> None:
        order = experts.flatten().argsort(stable=True)  # by row: token · K + place among the token's experts
        places = torch.empty_like(order)  # the inverse
        places[order] = torch.arange(len(order), device=order.device)
        self.places, self.backend, self.room = places.view_as(experts), backend, room
        if room is not None:
            self.places.masked_fill_(experts == count, room)
        self.on_device = rows_of_experts(experts.flatten(), count + 1)[:count]  # rows of every expert, int64
        self._count, self.known = count, counts

    @cached_property
    def counts(self) -> list[int]:
        """Rows of every expert, on the host."""
        found: list[int] = self.on_device.tolist() if self.known is None else list(self.known)
        return found

    @cached_property
    def ends(self) -> Tensor:
        """The end of every expert's rows, int32 as grouped products want them, on the device."""
        return self.on_device.cumsum(0).int()

    @property
    def number(self) -> Tensor | None:
        """The number of rows, `[1]`, on the device, where there is room for more."""
        return None if self.room is None else self.ends[-1:]

    @cached_property
    def numbers(self) -> Tensor:
        """The expert of every row, `[nK]`, on the device; any where there is none."""
        rows = torch.arange(self.room or self.places.numel(), device=self.places.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, rows, right=True).clamp_(max=self._count - 1)

    def runs(self) -> list[tuple[int, slice]]:
        """The experts that have rows, and these."""
        ends = accumulate(self.counts)
        return [
            (expert, slice(end - count, end))
            for expert, (count, end) in enumerate(zip(self.counts, ends, strict=True))
            if count
        ]

    def spread(self, x: Tensor) -> Tensor:
        """The rows `[nK, d]` of tokens `[…, d]`."""
        return spread_rows(x, self.places, self.backend, self.room)

    def collect(self, rows: Tensor) -> Tensor:
        """The sums `[…, d]` of the rows of every token."""
        return collect_rows(rows, self.places, self.backend, self.room is not None)

    def permuted(self, choices: Tensor) -> Tensor:
        """Numbers `[nK]` of rows, from those of choices `[…, K]`."""
        return spread_rows(choices.reshape(-1, 1), self.places.view(-1, 1), self.backend, self.room).squeeze(-1)


def rows_of_experts(experts: Tensor, count: int) -> Tensor:
    """Count how often each number below `count` is among `experts`: `[count]`, or `[b, count]` of `[b, …]`."""
    found = experts.new_zeros(*experts.shape[:-1], count)
    return found.scatter_add_(-1, experts, torch.ones_like(experts))


class GroupedProduct(Plain):
    """Products of rows with the weight of their expert: rows `[nK, in]`, weights `[E, out, in]`."""

    def __init__(self, rows: Rows, four_bits: torch.dtype | None = None) -> None:
        super().__init__(four_bits)
        self.rows = rows

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        assert bias is None  # see `add_biases`
        (inputs,), (weights,) = x, weight
        return self._of_rows(inputs, weights.mT, None, factor)

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        (of_output,), (weights,) = grad, weight
        return self._of_rows(of_output, weights, total, factor)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        (of_output,), (inputs,) = grad, x
        if _has_grouped_products(of_output, inputs):
            made: Tensor = torch._grouped_mm(of_output.t(), inputs, offs=self.rows.ends)
            return made if factor == 1 else made * factor
        made = inputs.new_zeros(len(self.rows.counts), of_output.shape[1], inputs.shape[1])
        for expert, mine in self.rows.runs():
            add_product(made[expert], of_output[mine].t(), inputs[mine], beta=0, alpha=factor)
        return made

    def _of_rows(self, x: Tensor, weights: Tensor, total: Tensor | None, factor: float) -> Tensor:
        """factor · x W of each row's W, added to `total` if that is given."""
        if _has_grouped_products(x, weights):
            made: Tensor = torch._grouped_mm(x, weights, offs=self.rows.ends)
            made = made if factor == 1 else made * factor
            return made if total is None else total.add_(made)
        found = x.new_empty(len(x), weights.shape[2]) if total is None else total
        for expert, mine in self.rows.runs():
            add_product(found[mine], x[mine], weights[expert], beta=int(total is not None), alpha=factor)
        return found


def add_biases(y: Tensor, biases: Tensor, rows: Rows, factors: Tensor | None = None) -> Tensor:
    """Add to each of the rows `y` `[nK, d]`, in place, the bias of its expert, of `[E, d]`.

    factors: by which the bias of each row is multiplied, `[nK]`; None: by 1.
    """
    added: Tensor = _Biased.apply(y, biases, rows, factors)
    return added


class _Biased(torch.autograd.Function):
    """The gradient of biases is a grouped product too, so that it is the same to the bit every time."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, biases: Tensor, rows: Rows, factors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(() if factors is None else (biases, factors)))
        ctx.rows = rows
        ctx.mark_dirty(y)
        for mine, bias in _biases_of_rows(y, biases, rows):
            if factors is None:
                y[mine] += bias
            else:
                y[mine].addcmul_(factors[mine, None], bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, saved = ctx.rows, ctx.saved_tensors
        columns = grad.new_ones(len(grad), ALIGNED_BYTES // 2)  # all are alike: one would not be aligned
        if saved:
            columns.mul_(saved[1][:, None])
        of_biases = GroupedProduct(rows).weight_gradient((grad,), (columns,))[..., 0]
        if not saved:
            return grad, of_biases, None, None
        biases, factors = saved
        of_factors = torch.empty_like(factors)
        for mine, bias in _biases_of_rows(grad, biases, rows):
            torch.sum(grad[mine] * bias, -1, dtype=factors.dtype, out=of_factors[mine])
        return grad, of_biases, None, of_factors


def _biases_of_rows(x: Tensor, biases: Tensor, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows with the bias of their expert, or some rows with the biases of theirs if all experts are one call."""
    if not _has_grouped_products(x):
        yield from ((mine, biases[expert]) for expert, mine in rows.runs())
        return
    step = max(1, BLOCK // x.shape[1])
    for start in range(0, len(x), step):
        mine = slice(start, start + step)
        yield mine, biases[rows.numbers[mine]]


class WideProduct(Plain):
    """Products in float32 or wider, whatever operands are in: of a router, whose choices hang on small differences.

    A bias is in that already.
    """

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        (inputs,), wide = x, widened(weight[0])
        return super().forward((inputs.to(wide.dtype),), (wide,), factor, bias)

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        (of_output,), (narrow,) = grad, weight
        made = super().input_gradient(grad, (narrow.to(of_output.dtype),), None, factor).to(narrow.dtype)
        return made if total is None else total.add_(made)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        (inputs,) = x
        return super().weight_gradient(grad, (inputs.to(grad[0].dtype),), factor).to(inputs.dtype)


WIDE_PRODUCT = WideProduct()


def widened(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(wide_dtype(x.dtype))


def _has_grouped_products(*operands: Tensor) -> bool:
    """Return whether one call computes the products of all experts: PyTorch has it in bf16 on CUDA, for aligned rows.

    On a CPU it takes as long as a call for each expert.
    """
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and max(x.stride()[-2:]) * x.itemsize % ALIGNED_BYTES == 0
        for x in operands
    )
