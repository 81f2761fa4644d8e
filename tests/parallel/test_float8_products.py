"""Matrix products in 8 bits: those of the rounded operands, near those of operands that are not rounded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.parallel import float8
from megalite.parallel.float8 import RECIPES, Float8, MxFloat8, RowwiseFloat8, WeightCasts
from megalite_kernels import mxfp8
from megalite_kernels.float8 import ACTIVATION, GRADIENT, amax, reference, scale_for

WIDE = torch.float64


def rounded(x: Tensor, dtype: torch.dtype, dim: int, recipe: str) -> Tensor:
    """What a tensor in 8 bits stands for. dim: along which numbers share a scale, if not all of them do."""
    if recipe == "mx":
        return mxfp8.wide(*mxfp8.reference(x.movedim(dim, -1))).double().movedim(-1, dim)
    scale = scale_for(amax(x, dim if recipe == "rowwise" else None), dtype)
    return reference(x, scale, dtype).double() / scale


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def product(recipe: str) -> Float8:
    return RECIPES[recipe](WIDE, WeightCasts(held=False))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        3 * torch.randn(16, 4, 96, dtype=WIDE, generator=generator),
        torch.randn(32, 96, dtype=WIDE, generator=generator) / 50,
        1e-4 * torch.randn(16, 4, 32, dtype=WIDE, generator=generator),
    )


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_products_are_those_of_the_rounded_operands(product: Float8, recipe: str, factor: float) -> None:
    x, weight, grad = operands()
    kind = GRADIENT if recipe == "tensorwise" else ACTIVATION
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    close = {"rtol": 1e-12, "atol": 1e-18}
    wide_x, matrix = rounded(x, ACTIVATION, -1, recipe), grad.flatten(0, 1)
    expected = factor * wide_x @ rounded(weight, ACTIVATION, -1, recipe).t()
    torch.testing.assert_close(product.forward(prepared, (weight,), factor), expected, **close)
    with_bias = product.forward(prepared, (weight,), factor, weight[:, 0])
    torch.testing.assert_close(with_bias, expected + weight[:, 0], **close)
    expected = factor * rounded(grad, kind, -1, recipe) @ rounded(weight, ACTIVATION, 0, recipe)
    torch.testing.assert_close(product.input_gradient(of_output, (weight,), None, factor), expected, **close)
    torch.testing.assert_close(product.input_gradient(of_output, (weight,), x.clone(), factor), x + expected, **close)
    of_tokens = rounded(wide_x.flatten(0, 1), ACTIVATION, 0, recipe)
    expected = factor * rounded(matrix, kind, 0, recipe).t() @ of_tokens
    kept = product.prepare_kept(prepared)
    torch.testing.assert_close(product.weight_gradient(of_output, kept, factor), expected, **close)


def test_gradients_are_near_those_that_are_not_rounded(product: Float8) -> None:
    """Each operand is rounded by 2⁻⁴ of a number at most, gradients with one scale by 2⁻³."""
    x, weight, grad = operands()
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    kept = product.prepare_kept(prepared)
    found = product.input_gradient(of_output, (weight,), None), product.weight_gradient(of_output, kept)
    rounding = 2**-4 + (2**-3 if product.gradient == GRADIENT else 2**-4)
    for near, exact in zip(found, (grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)), strict=True):
        assert 0 < (near - exact).norm() < rounding / 2 * exact.norm()


@pytest.mark.parametrize(("recipe", "kept"), [("tensorwise", False), ("rowwise", True), ("mx", True)])
def test_small_rows_are_kept_where_each_has_a_scale(recipe: str, kept: bool) -> None:
    (x, weight, _), product = operands(), RECIPES[recipe](WIDE, WeightCasts(held=False))
    x[0] *= 2.0**-40
    y = product.forward(product.prepare(x), (weight,))
    assert (y[0] != 0).all() == kept
    assert (y[1:] != 0).all()


def test_a_kept_input_is_rounded_no_second_time_where_it_is_not_small_in_its_column() -> None:
    x, product = operands()[0], RowwiseFloat8(WIDE, WeightCasts(held=False))
    whole = rounded(x, ACTIVATION, -1, "rowwise").flatten(0, 1)
    columns, inverse = product.prepare_kept(product.prepare(x))
    again = (columns.double() * inverse).t()
    large = whole.abs() >= amax(whole, 0) * 2.0**-14  # 448 / 2⁻⁶, the least normal number, is above 2¹⁴
    assert large.sum() > 0.9 * large.numel()
    assert torch.equal(again[large], whole[large])


def test_nor_where_it_is_not_small_in_its_block() -> None:
    x, product = operands()[0], MxFloat8(WIDE, WeightCasts(held=False))
    whole = rounded(x, ACTIVATION, -1, "mx").flatten(0, 1)
    again = mxfp8.wide(*product.prepare_kept(product.prepare(x))).double().t()
    large = whole.abs() >= (amax(whole.unflatten(0, (-1, 32)), 1) * 2.0**-14).expand(-1, 32, -1).flatten(0, 1)
    assert large.sum() > 0.9 * large.numel()
    assert torch.equal(again[large], whole[large])


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_products_of_bfloat16_are_pytorchs_and_round_the_same_numbers(
    recipe: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 14 bits are in forward alone."""
    if recipe == "mx" or (recipe == "rowwise" and not float8.CPU_SCALES_ROWS):
        pytest.skip("PyTorch has no such product on CPUs, and with scales of rows none before 2.12")
    x, weight, grad = (each.bfloat16() for each in operands())
    found, fast, scaled_mm = [], list[bool](), torch._scaled_mm

    def noted(*args: Any, use_fast_accum: bool, **options: Any) -> Tensor:
        fast.append(use_fast_accum)
        return scaled_mm(*args, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    for product in (RECIPES[recipe](dtype, WeightCasts(held=False)) for dtype in (torch.bfloat16, WIDE)):
        prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
        y, of_x = (
            product.forward(prepared, (weight,), factor, weight[:, 0]),
            product.input_gradient(of_output, (weight,), None, factor),
        )
        found.append((y, of_x, product.weight_gradient(of_output, product.prepare_kept(prepared), factor)))
    assert fast == [True, False, False]
    for near, exact in zip(*found, strict=True):
        assert near.dtype == torch.bfloat16
        torch.testing.assert_close(near.double(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item())


def product_of_blocks(
    a: Tensor,
    b: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """A GPU's product, whose scales lie in tiles; shapes and strides are those that it takes."""
    exact = []
    for values, scales in ((a, of_a), (b.t(), of_b)):
        assert values.is_contiguous()
        assert scales.dtype == torch.float8_e8m0fnu
        down, across = -(-len(values) // 128), -(-values.shape[1] // 128)
        plain = scales.view(torch.uint8).view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
        plain = plain.reshape(128 * down, 4 * across)[: len(values), : values.shape[1] // 32]
        exact.append(mxfp8.wide(values, plain).double())
    made = (exact[0] @ exact[1].t() + (0 if bias is None else bias.double())).to(out_dtype)
    return made if out is None else out.copy_(made)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_gpu_multiplies_the_same_blocks(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales lie in tiles; weight gradients are float32 where they are added up."""
    x, weight, grad = (each.bfloat16() for each in operands())
    found = []
    for dtype, has_gpu in ((torch.bfloat16, True), (WIDE, False)):
        monkeypatch.setattr(torch, "_scaled_mm", product_of_blocks)
        monkeypatch.setattr(float8, "has_gpu_products", lambda _, has_gpu=has_gpu: has_gpu)
        product, sums = MxFloat8(dtype, WeightCasts(held=True)), (torch.ones(32, 96), torch.ones(32, 96))
        with product.casts.once():
            prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
            w = product.prepare_weight(weight, weight)
            kept = product.prepare_kept(prepared)
            y = product.forward(prepared, w, factor, weight[:, 0])
            of_x = product.input_gradient(of_output, w, None, factor)
        for total, has_values in zip(sums, (True, False), strict=True):
            product.add_weight_gradient(total, has_values, of_output, kept, factor)
        found.append((y, of_x, product.weight_gradient(of_output, kept, factor), *sums))
    for near, exact in zip(*found, strict=True):
        unit = 2**-8 if near.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(near.double(), exact.double(), rtol=unit, atol=unit * exact.abs().max().item())


def test_a_traced_product_and_its_gradients_are_those_of_others(product: Float8) -> None:
    x, weight, grad = operands()
    prepared, of_output, factor = product.prepare(x), product.prepare_gradient(grad), 0.3
    bias = torch.ones(len(weight), dtype=WIDE, requires_grad=True)
    y = float8._Traced.apply(x.requires_grad_(), weight.requires_grad_(), bias, product, factor)
    of_x, of_weight, of_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    assert torch.equal(y, product.forward(prepared, (weight,), factor, bias))
    assert torch.equal(of_bias, grad.flatten(0, 1).sum(0))
    assert torch.equal(of_x, product.input_gradient(of_output, (weight,), None, factor))
    assert torch.equal(of_weight, product.weight_gradient(of_output, product.prepare_kept(prepared), factor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, WIDE])
def test_products_of_zeros_are_zeros(recipe: str, dtype: torch.dtype) -> None:
    product = RECIPES[recipe](dtype, WeightCasts(held=False))
    x, weight, grad = (torch.zeros_like(each, dtype=dtype) for each in operands())
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    for found in (
        product.forward(prepared, (weight,)),
        product.input_gradient(of_output, (weight,), None),
        product.weight_gradient(of_output, product.prepare_kept(prepared)),
    ):
        assert torch.equal(found, torch.zeros_like(found))
