"""The matrix products of linear layers, as one object, which `train.product` chooses: PyTorch's, or one of your own."""

import importlib
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Prepared = tuple[Tensor, ...]


class Product(Protocol):
    """Products of activations `[…, in]`, a weight `[out, in]`, and gradients of outputs `[…, out]`.

    All are multiplied by `factor`, which matrix products take without another pass over their results. A compiled layer
    calls `prepare` and `forward` only, so autograd must be able to differentiate these.
    """

    def prepare(self, x: Tensor) -> Prepared:
        """Prepare an input, once for all products that share it: cast it, for example, and find its scales.

        These tensors are kept for backward. Tensor parallelism gathers each along its first dimension, which is that of
        x: the products are given all ranks' tensors, put together.
        """

    def forward(self, x: Prepared, weight: Tensor, factor: float = 1.0) -> Tensor:
        """x Wᵀ, `[…, out]`."""

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None, factor: float = 1.0) -> Tensor:
        """grad W, `[…, in]`; added to `total`, in place, if that is given."""

    def weight_gradient(self, grad: Tensor, x: Prepared, factor: float = 1.0) -> Tensor:
        """gradᵀ x, `[out, in]`."""


class Plain:
    """Products by PyTorch, in the data type of the operands."""

    def prepare(self, x: Tensor) -> Prepared:
        return (x,)

    def forward(self, x: Prepared, weight: Tensor, factor: float = 1.0) -> Tensor:
        (whole,) = x
        if factor == 1:
            return F.linear(whole, weight)
        return _product(whole.flatten(0, -2), weight.t(), factor).unflatten(0, whole.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None, factor: float = 1.0) -> Tensor:
        if total is None:
            if factor == 1:
                return grad @ weight
            return _product(grad.flatten(0, -2), weight, factor).unflatten(0, grad.shape[:-1])
        total.flatten(0, -2).addmm_(grad.flatten(0, -2), weight, alpha=factor)
        return total

    def weight_gradient(self, grad: Tensor, x: Prepared, factor: float = 1.0) -> Tensor:
        of_output, inputs = grad.flatten(0, -2).t(), x[0].flatten(0, -2)
        return of_output @ inputs if factor == 1 else _product(of_output, inputs, factor)


def _product(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """factor · x y, for matrices."""
    return torch.addmm(x.new_zeros(()), x, y, beta=0, alpha=factor)


PLAIN_PRODUCT = Plain()
METHODS = ("prepare", "forward", "input_gradient", "weight_gradient")


def product_of(name: str) -> Product:
    """The product that `train.product` names: `plain`, or `MODULE:OBJECT`. Raises ValueError if there is none."""
    if name == "plain":
        return PLAIN_PRODUCT
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if missing := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise ValueError(f"has no {missing[0]}(), which megalite.parallel.product.Product describes")
    return cast(Product, found)
