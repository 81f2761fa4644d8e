"""Tokens brought to their experts and back, and matrix products of which every row has the weight of its expert.

Rows are tokens, once for each of their experts, in the order of experts, and of tokens where the expert is the same. So
an expert's rows are a run, and a product with its weight is one of matrices. Rows that come back are added up in the
order in which a token chose its experts.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megalite.parallel.product import Plain, Prepared
from megalite_kernels import collect_rows, spread_rows
from megalite_kernels.backend import Backend, wide_dtype

ALIGNED_BYTES = 16  # a row's of an operand of a grouped product


class Rows:
    """The order of rows for the `experts` `[…, K]` that tokens `[…]` have chosen, of `count`.

    counts: by expert, its rows, where the host knows them; None: the host waits for them if it has to. backend: of
    `spread_rows` and `collect_rows`.
    """

    def __init__(
        self, experts: Tensor, count: int, counts: Sequence[int] | None = None, backend: Backend = "auto"
    ) -> None:
        order = experts.flatten().argsort(stable=True)  # by row: token · K + place among the token's experts
        places = torch.empty_like(order)  # the inverse
        places[order] = torch.arange(len(order), device=order.device)
        self.places, self.backend = places.view_as(experts), backend
        self._experts, self._count, self.known = experts, count, counts

    @cached_property
    def counts(self) -> list[int]:
        """Rows of every expert, on the host."""
        found: list[int] = self.on_device.tolist() if self.known is None else list(self.known)
        return found

    @cached_property
    def ends(self) -> Tensor:
        """The end of every expert's rows, int32 as grouped products want them, on the device."""
        return self.on_device.cumsum(0).int()

    @cached_property
    def on_device(self) -> Tensor:
        """Rows of every expert, `[count]`, int64."""
        return rows_of_experts(self._experts.flatten(), self._count)

    def spread(self, x: Tensor) -> Tensor:
        """The rows `[nK, d]` of tokens `[…, d]`."""
        return spread_rows(x, self.places, self.backend)

    def collect(self, rows: Tensor) -> Tensor:
        """The sums `[…, d]` of the rows of every token."""
        return collect_rows(rows, self.places, self.backend)

    def permuted(self, choices: Tensor) -> Tensor:
        """Numbers `[nK]` of rows, from those of choices `[…, K]`."""
        return spread_rows(choices.reshape(-1, 1), self.places.view(-1, 1), self.backend).squeeze(-1)


def rows_of_experts(experts: Tensor, count: int) -> Tensor:
    """Count how often each number below `count` is among `experts`: `[count]`, or `[b, count]` of `[b, …]`."""
    found = experts.new_zeros(*experts.shape[:-1], count)
    return found.scatter_add_(-1, experts, torch.ones_like(experts))


class GroupedProduct(Plain):
    """Products of rows with the weight of their expert: rows `[nK, in]`, weights `[E, out, in]`."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        assert bias is None  # no expert has one
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
        for expert, mine in self._runs():
            torch.addmm(made[expert], of_output[mine].t(), inputs[mine], beta=0, alpha=factor, out=made[expert])
        return made

    def _of_rows(self, x: Tensor, weights: Tensor, total: Tensor | None, factor: float) -> Tensor:
        """factor · x W of each row's W, added to `total` if that is given."""
        if _has_grouped_products(x, weights):
            made: Tensor = torch._grouped_mm(x, weights, offs=self.rows.ends)
            made = made if factor == 1 else made * factor
            return made if total is None else total.add_(made)
        found = x.new_empty(len(x), weights.shape[2]) if total is None else total
        for expert, mine in self._runs():
            torch.addmm(found[mine], x[mine], weights[expert], beta=total is not None, alpha=factor, out=found[mine])
        return found

    def _runs(self) -> list[tuple[int, slice]]:
        """The experts that have rows, and these."""
        counts = self.rows.counts
        ends = accumulate(counts)
        return [
            (expert, slice(end - count, end))
            for expert, (count, end) in enumerate(zip(counts, ends, strict=True))
            if count
        ]


class WideProduct(Plain):
    """Products in float32 or wider, whatever operands are in: of a router, whose choices hang on small differences."""

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        (inputs,), (wide,) = x, (weight[0].to(wide_dtype(weight[0].dtype)),)
        return super().forward((inputs.to(wide.dtype),), (wide,), factor, bias)

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        (of_output,), (narrow,) = grad, weight
        made = super().input_gradient(grad, (narrow.to(of_output.dtype),), None, factor).to(narrow.dtype)
        return made if total is None else total.add_(made)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        (inputs,) = x
        return super().weight_gradient(grad, (inputs.to(grad[0].dtype),), factor).to(inputs.dtype)


WIDE_PRODUCT = WideProduct()


def _has_grouped_products(*operands: Tensor) -> bool:
    """Return whether one call computes the products of all experts: PyTorch has it in bf16 on CUDA, for aligned rows.

    On a CPU it takes as long as a call for each expert.
    """
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and max(x.stride()[-2:]) * x.itemsize % ALIGNED_BYTES == 0
        for x in operands
    )
