"""Rows of experts, and the products of each row with the weight of its expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.parallel import experts as products
from megalite.parallel.experts import WIDE_PRODUCT, GroupedProduct, Rows, rows_of_experts
from megalite.parallel.recompute import recompute, remembered

CHOICES = {  # of 6 tokens, with experts that nobody chooses at either end and between
    "all but one": [[0, 1], [4, 3], [1, 0], [3, 4], [0, 4], [1, 3]],
    "the last": [[4], [4], [4], [4], [4], [4]],
    "the first two": [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0], [1, 0]],
    "all": [[2, 0, 4, 1, 3]] * 6,
}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_rows_are_in_the_order_of_experts_and_of_tokens(count: int, tokens: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, count))
    order = st.permutations(range(count)).map(lambda each: each[:active])
    choices = [data.draw(order) for _ in range(tokens)]
    experts = torch.tensor(choices)
    rows = Rows(experts, count)
    wanted = sorted((expert, token, place) for token, each in enumerate(choices) for place, expert in enumerate(each))
    order = [token * active + place for _, token, place in wanted]
    assert rows.places.flatten()[order].tolist() == list(range(tokens * active))
    assert rows.counts == [sum(expert == each for each, *_ in wanted) for expert in range(count)]
    assert rows.ends.tolist() == [sum(rows.counts[: expert + 1]) for expert in range(count)]
    x = torch.arange(tokens, dtype=torch.float64)[:, None]
    assert rows.spread(x)[:, 0].tolist() == [token for _, token, _ in wanted]
    assert torch.equal(rows.collect(rows.spread(x)), active * x)
    numbers = torch.arange(tokens * active, dtype=torch.float64).view(tokens, active)
    assert rows.permuted(numbers).tolist() == order


def test_choices_of_other_ranks_have_no_rows() -> None:
    """Their number is 2, one more than experts have here. Rows behind the last are of any expert that there is."""
    rows = Rows(torch.tensor([[0, 2], [2, 1], [2, 2], [1, 0]]), 2, room=6)
    assert rows.places.tolist() == [[0, 6], [6, 2], [6, 6], [3, 1]]
    assert (rows.counts, rows.ends.tolist()) == ([2, 2], [2, 4])
    assert rows.number is not None
    assert rows.number.tolist() == [4]
    assert rows.numbers.tolist() == [0, 0, 1, 1, 1, 1]
    x = torch.arange(4, dtype=torch.float64)[:, None]
    assert rows.spread(x)[:4, 0].tolist() == [0, 3, 1, 3]
    assert rows.collect(rows.spread(x))[:, 0].tolist() == [0, 1, 0, 6]
    assert rows.permuted(torch.arange(8.0).view(4, 2))[:4].tolist() == [0, 7, 3, 6]


def test_rows_of_every_sequence_are_counted_apart() -> None:
    experts = torch.tensor([[0, 4, 4, 1], [2, 2, 2, 2]])
    assert rows_of_experts(experts, 5).tolist() == [[1, 1, 0, 0, 2], [0, 0, 4, 0, 0]]


@pytest.mark.parametrize("name", ["spread", "collect", "permuted"])
def test_gradients_of_moving_rows(name: str) -> None:
    rows = Rows(torch.tensor(CHOICES["all but one"]).view(3, 2, 2), 5)
    shape = {"spread": (3, 2, 4), "collect": (12, 4), "permuted": (3, 2, 2)}[name]
    assert torch.autograd.gradcheck(getattr(rows, name), random(*shape, seed=0).requires_grad_())


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_all_experts_in_one_call_or_in_many(
    dtype: torch.dtype, name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = torch.tensor(CHOICES[name])
    each = sorted(experts.flatten().tolist())
    x, grad, total = (random(len(each), size, seed=size, dtype=dtype) for size in (8, 16, 8))
    weights = random(5, 16, 8, seed=1, dtype=dtype)
    wide, wide_x, wide_grad = weights.double(), x.double(), grad.double()
    into = torch.zeros(5, 16, 8, dtype=torch.float64)
    for row, expert in enumerate(each):
        into[expert] += factor * torch.outer(wide_grad[row], wide_x[row])
    outputs = torch.stack([factor * wide[expert] @ wide_x[row] for row, expert in enumerate(each)])
    inputs = torch.stack([factor * wide_grad[row] @ wide[expert] for row, expert in enumerate(each)])
    expected = outputs, inputs, total.double() + inputs, into
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for grouped in (False, True) if dtype != torch.float64 else (False,):
        monkeypatch.setattr(products, "_has_grouped_products", lambda *_, grouped=grouped: grouped)
        product, mine = GroupedProduct(Rows(experts, 5)), total.clone()
        found = (
            product.forward((x,), (weights,), factor),
            product.input_gradient((grad,), (weights,), None, factor),
            product.input_gradient((grad,), (weights,), mine, factor),
            product.weight_gradient((grad,), (x,), factor),
        )
        assert found[2] is mine
        for number, correct in zip(found, expected, strict=True):
            assert number.dtype == dtype
            assert (number.double() - correct).abs().max() <= rounding * correct.abs().max()
        assert [expert for expert in range(5) if found[3][expert].any()] == sorted(set(each))


def test_one_call_wants_bf16_on_cuda_and_rows_of_whole_16_bytes() -> None:
    with FakeTensorMode():
        rows, fits, narrow = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((9, 24), (3, 24, 16), (3, 24, 12))
        )
        assert products._has_grouped_products(rows, fits)
        assert products._has_grouped_products(rows.t(), fits.mT)
        for operand in (narrow, narrow.mT, fits.float(), torch.empty(24, 16, dtype=torch.bfloat16)):
            assert not products._has_grouped_products(rows, operand)


def test_products_of_a_router_are_in_float32() -> None:
    x, weight, grad = random(6, 8, seed=0).bfloat16(), random(4, 8, seed=1).bfloat16(), random(6, 4, seed=2).float()
    y = WIDE_PRODUCT.forward((x,), (weight,))
    assert torch.equal(y, x.float() @ weight.float().t())
    of_x, total = grad @ weight.float(), random(6, 8, seed=3).bfloat16()
    assert torch.equal(WIDE_PRODUCT.input_gradient((grad,), (weight,), None), of_x.bfloat16())
    assert torch.equal(WIDE_PRODUCT.input_gradient((grad,), (weight,), total.clone()), total + of_x.bfloat16())
    assert torch.equal(WIDE_PRODUCT.weight_gradient((grad,), (x,)), (grad.t() @ x.float()).bfloat16())


class Chooses(torch.nn.Module):
    """A layer that makes two choices, which would be others the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def forward(self, x: Tensor) -> Tensor:
        return (x * remembered(self._next)).exp() * remembered(self._next)

    def _next(self) -> int:
        self.made += 1
        return self.made


def test_full_recompute_takes_the_choices_of_each_pass() -> None:
    """Of two passes under way, backward of the first comes first. An evaluation between them takes others."""
    layer = Chooses()
    recompute(layer, "full")
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    first = layer(x)
    with torch.no_grad():
        layer(x)
    second = layer(x)
    for y, (a, b) in ((first, (1, 2)), (second, (5, 6))):
        (grad,) = torch.autograd.grad(y, x)
        assert grad == pytest.approx((a * b * (0.5 * torch.tensor(a)).exp()).item(), rel=1e-6)
    assert layer.made == 6
