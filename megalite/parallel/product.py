"""The matrix products of linear layers, as one object, which `train.product` chooses: PyTorch's, or one of your own."""

import importlib
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.parallel.parameter import in_four_bits, put
from megalite_kernels import products
from megalite_kernels.nf4 import dequantize_nf4
from megalite_kernels.products import add_product, has_gpu_products, linear, matmul

Prepared = tuple[Tensor, ...]


class Product(Protocol):
    """Products of activations `[…, in]`, a weight `[out, in]`, and gradients of outputs `[…, out]`.

    Each of them is first prepared, once for all products that it is in: cast, for example. Products are multiplied by
    `factor`, which they take without another pass over their results. A compiled layer calls `prepare`,
    `prepare_weight` and `forward` only, so autograd must be able to differentiate these.
    """

    def prepare(self, x: Tensor) -> Prepared:
        """Prepare an input, and find its scales, for example.

        These tensors are kept for backward. Tensor parallelism gathers each along its first dimension, which is that of
        x: the products are given all ranks' tensors, put together. One without dimensions is left as it is.
        """

    def prepare_weight(self, weight: Tensor, part: Tensor) -> Prepared:
        """Prepare a weight for forward or for gradients of inputs. part: this rank's part of it, `[out, in]`."""

    def prepare_gradient(self, grad: Tensor) -> Prepared:
        """Prepare the gradient of an output."""

    def prepare_kept(self, x: Prepared) -> Prepared:
        """Prepare a kept input, once more, for gradients of weights."""

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ, `[…, out]`, plus bias `[out]`, which is not multiplied by `factor`."""

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        """grad W, `[…, in]`; added to `total`, in place, if that is given."""

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        """gradᵀ x, `[out, in]`.

        A product may also have a method `add_weight_gradient`, which puts this into a sum that is as wide as weights
        are kept, without rounding it in between; see `Plain`.
        """


class Plain:
    """Products by PyTorch, in the data type of the operands.

    four_bits: the data type as which weights in four bits are made wide; None: there are no such weights.
    """

    def __init__(self, four_bits: torch.dtype | None = None) -> None:
        self.four_bits = four_bits

    def prepare(self, x: Tensor) -> Prepared:
        return (x,)

    def prepare_weight(self, weight: Tensor, part: Tensor) -> Prepared:
        if self.four_bits is None or torch.compiler.is_compiling():  # in a compiled layer, `forward` makes it wide
            return (part,)
        return (self._wide(part),)

    def prepare_gradient(self, grad: Tensor) -> Prepared:
        return (grad,)

    def prepare_kept(self, x: Prepared) -> Prepared:
        return x

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        (whole,), (w,) = x, weight
        if self.four_bits is not None and in_four_bits(w):  # compiled: it would keep the wide one for backward
            made: Tensor = checkpoint(self._of_four_bits, whole, w, factor, bias, use_reentrant=False)
            return made
        if factor == 1 and not products.PREFERS_ONEDNN:  # the most frequent calls of the host, one less for each
            return F.linear(whole, w, bias)
        return linear(whole, w, bias, factor)

    def _of_four_bits(self, whole: Tensor, w: Tensor, factor: float, bias: Tensor | None) -> Tensor:
        return self.forward((whole,), (self._wide(w),), factor, bias)

    def _wide(self, weight: Tensor) -> Tensor:
        if self.four_bits is None or not in_four_bits(weight):
            return weight
        return dequantize_nf4(weight, self.four_bits)

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        (g,), (w,) = grad, weight
        if total is None:
            return g @ w if factor == 1 and not products.PREFERS_ONEDNN else matmul(g, w, factor)
        if products.PREFERS_ONEDNN:
            add_product(total.flatten(0, -2), g.flatten(0, -2), w, alpha=factor)
        else:
            total.flatten(0, -2).addmm_(g.flatten(0, -2), w, alpha=factor)
        return total

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        of_output, inputs = grad[0].flatten(0, -2).t(), x[0].flatten(0, -2)
        if factor == 1 and not products.PREFERS_ONEDNN:
            return of_output @ inputs
        return matmul(of_output, inputs, factor)

    def add_weight_gradient(
        self, total: Tensor, has_values: bool, grad: Prepared, x: Prepared, factor: float = 1.0
    ) -> None:
        """Add gradᵀ x to `total`, or put it there if `total` has no values yet."""
        if has_gpu_products(total) and type(self).weight_gradient is Plain.weight_gradient:
            add_product(total, grad[0].flatten(0, -2).t(), x[0].flatten(0, -2), int(has_values), factor)
        else:  # wide copies of the operands would take more memory than the gradient
            add_rounded(total, has_values, self.weight_gradient(grad, x, factor))


def add_weight_gradient(
    product: Product, total: Tensor, has_values: bool, grad: Prepared, x: Prepared, factor: float
) -> None:
    """`Plain.add_weight_gradient`, by a product that may not have the method."""
    if hasattr(product, "add_weight_gradient"):
        product.add_weight_gradient(total, has_values, grad, x, factor)
    else:
        add_rounded(total, has_values, product.weight_gradient(grad, x, factor))


def add_rounded(total: Tensor, has_values: bool, grad: Tensor) -> None:
    """Add a gradient that was rounded to another data type, or put it there if `total` has no values yet."""
    if has_values:
        total.add_(grad)
    else:
        put(total, grad)


def sum_over_tokens(grad: Tensor) -> Tensor:
    """The gradient of a bias, from that of the output `[…, out]`."""
    return grad.flatten(0, -2).sum(0)


PLAIN_PRODUCT = Plain()
METHODS = [name for name in vars(Product) if not name.startswith("_")]


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
