"""The matrix products of a linear layer, as one object. To compute them in another precision, replace that object."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """Products of activations `[…, in]`, a weight `[out, in]`, and gradients of outputs `[…, out]`.

    All are multiplied by `factor`, which matrix products take without another pass over their results. A compiled layer
    calls `forward` only, so autograd must be able to differentiate `forward`.
    """

    def forward(self, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
        """x Wᵀ, `[…, out]`."""

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None, factor: float = 1.0) -> Tensor:
        """grad W, `[…, in]`; added to `total`, in place, if that is given."""

    def weight_gradient(self, grad: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        """gradᵀ x, `[out, in]`."""


class Plain:
    """Products by PyTorch, in the data type of the operands."""

    def forward(self, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
        if factor == 1:
            return F.linear(x, weight)
        return _product(x.flatten(0, -2), weight.t(), factor).unflatten(0, x.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None, factor: float = 1.0) -> Tensor:
        if total is None:
            if factor == 1:
                return grad @ weight
            return _product(grad.flatten(0, -2), weight, factor).unflatten(0, grad.shape[:-1])
        total.flatten(0, -2).addmm_(grad.flatten(0, -2), weight, alpha=factor)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        of_output, x = grad.flatten(0, -2).t(), x.flatten(0, -2)
        return of_output @ x if factor == 1 else _product(of_output, x, factor)


def _product(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """factor · x y, for matrices."""
    return torch.addmm(x.new_zeros(()), x, y, beta=0, alpha=factor)


PLAIN = Plain()
