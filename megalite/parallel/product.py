"""The matrix products of a linear layer, as one object. To compute them in another precision, replace that object."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """Products of activations `[…, in]`, a weight `[out, in]`, and gradients of outputs `[…, out]`.

    A compiled layer calls `forward` only, so autograd must be able to differentiate `forward`.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ, `[…, out]`."""

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        """grad W, `[…, in]`; added to `total`, in place, if that is given."""

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """gradᵀ x, `[out, in]`."""


class Plain:
    """Products by PyTorch, in the data type of the operands."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        if total is None:
            return grad @ weight
        total.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


PLAIN = Plain()
