"""Matrix products of a CPU by oneDNN, beside the same in float64, and where they are taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalite_kernels import products

TOLERANCE = 1e-6  # of the largest element, or of what it would be if all that is added had one sign

pytestmark = pytest.mark.skipif(not products.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


@pytest.fixture(scope="module", autouse=True)
def onednn() -> object:
    """oneDNN on any processor, for products of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "PREFERS_ONEDNN", True)
        patch.setattr(products, "LEAST_MULTIPLICATIONS", 1)
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(rows: int, columns: int, layout: str, seed: int) -> Tensor:
    """A matrix whose rows or columns lie one behind the other, or which is a part of a larger one."""
    if layout == "columns":
        return random(columns, rows, seed=seed).t()
    if layout == "part":
        return random(rows + 3, columns + 5, seed=seed)[2:-1, 1:-4]
    return random(rows, columns, seed=seed)


def assert_near(got: Tensor, expected: Tensor, size: float | None = None) -> None:
    """size: of what is added for an element at most; None: about as large as the largest element."""
    assert got.dtype == torch.float32
    largest = expected.abs().max().item() if size is None else size
    assert (got.double() - expected).abs().max() <= TOLERANCE * largest


sizes = st.integers(1, 40)
layouts = st.sampled_from(["rows", "columns", "part"])


@given(sizes, sizes, sizes, layouts, layouts, st.sampled_from([1.0, -2.5]), st.booleans())
def test_products_are_those_in_float64(
    rows: int, depth: int, columns: int, of_a: str, of_b: str, factor: float, biased: bool
) -> None:
    a, b = laid_out(rows, depth, of_a, 0), laid_out(depth, columns, of_b, 1)
    bias = random(columns, seed=2) if biased else None
    expected = factor * (a.double() @ b.double())
    added = expected if bias is None else expected + bias.double()
    size = (abs(factor) * (a.abs() @ b.abs()) + (0 if bias is None else bias.abs())).max().item()
    assert_near(products.matmul(a, b, factor), expected, size)
    assert_near(products.linear(a, b.t(), bias, factor), added, size)
    with torch.no_grad():
        assert_near(products.linear(a.unflatten(0, (1, rows)), b.t(), bias, factor)[0], added, size)


def test_a_bias_may_be_a_part_of_another() -> None:
    x, weight = random(4, 6), random(8, 6, seed=1)
    for bias in (random(16, seed=2)[::2], random(1, seed=2).expand(8)):
        assert_near(products.linear(x, weight, bias), x.double() @ weight.double().t() + bias.double())


@pytest.mark.parametrize("shape", [(2600, 3), (3, 2600), (1025, 1024), (5, 7)], ids=str)
@pytest.mark.parametrize(("beta", "alpha"), [(0, 1.0), (1, 1.0), (1, 0.25), (0, 0.25)])
def test_a_product_goes_into_memory_block_by_block(shape: tuple[int, int], beta: int, alpha: float) -> None:
    a, b = random(21, shape[0]).t(), random(21, shape[1], seed=1)
    total = random(*shape, seed=2)
    expected = alpha * (a.double() @ b.double()) + (total.double() if beta else 0)
    given = total.clone() if beta else torch.full(shape, torch.nan)
    products.add_product(given, a, b, beta, alpha)
    assert_near(given, expected)
    assert_near(products.addmm(total, a, b, -0.5, alpha), alpha * (a.double() @ b.double()) - 0.5 * total.double())
    products.multiply(a, b, given)
    assert_near(given, a.double() @ b.double())


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1.0), (0, 0.25)])
def test_sums_wider_than_the_operands(beta: int, alpha: float) -> None:
    a, b, total = random(21, 1500).t().bfloat16(), random(21, 4, seed=1).bfloat16(), random(1500, 4, seed=2)
    expected = beta * total.double() + alpha * (a.double() @ b.double())
    products.add_product(total, a, b, beta, alpha)
    assert_near(total, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_are_those_in_float64(compiled: bool, factor: float) -> None:
    def run(linear: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in given]
        made = linear(*leaves, factor).mul_(2)
        made.backward(random(*made.shape, seed=5).to(made.dtype))
        return [made.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    given = random(2, 9, 33), random(17, 33, seed=1), random(17, seed=2)
    linear = torch.compile(products.linear, fullgraph=True, dynamic=False) if compiled else products.linear
    expected = run(products.linear, *(each.double() for each in given))
    got = run(linear, *given)
    assert len(got) == len(expected) == 4
    for each, wide in zip(got, expected, strict=True):
        assert_near(each, wide)


def test_gradients_of_gradients_are_those_in_float64() -> None:
    def run(*leaves: Tensor) -> list[Tensor]:
        (grad,) = torch.autograd.grad(products.linear(*leaves).square().sum(), leaves[0], create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), leaves))

    leaves = [random(4, 6).requires_grad_(), random(5, 6, seed=1).requires_grad_()]
    for got, wide in zip(run(*leaves), run(*(each.detach().double().requires_grad_() for each in leaves)), strict=True):
        assert_near(got, wide)


@pytest.mark.parametrize("trained", ["input", "weight"])
def test_nothing_is_kept_for_what_needs_no_gradient(trained: str) -> None:
    x, weight, kept = random(4, 6), random(5, 6, seed=1), []
    leaf, other = (x, weight) if trained == "input" else (weight, x)
    leaf.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        products.linear(x, weight).sum().backward()
    assert [each.data_ptr() for each in kept] == [other.data_ptr()]
    assert leaf.grad is not None
    assert other.grad is None


def test_the_operation_is_as_it_is_registered() -> None:
    x, weight, bias = random(2, 4, 6).requires_grad_(), random(3, 6).requires_grad_(), random(3).requires_grad_()
    torch.library.opcheck(torch.ops.megalite.linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.megalite.linear.default, (x, weight, None))


class Operands(TorchDispatchMode):
    """Shapes of what oneDNN is given, whose elements lie side by side: it takes a thousand times as long for others."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            x, weight = args[:2]
            assert x.is_contiguous() or x.t().is_contiguous()
            assert weight.is_contiguous() or weight.t().is_contiguous()
            self.found.append((*x.shape, *weight.shape))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_factor_and_a_bias_change_the_result_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    results, make = [], products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *given: results.append(make(*given)) or results[-1])
    x, weight, bias = random(4, 6), random(5, 6, seed=1), random(5, seed=2)
    assert products.linear(x, weight, bias, 0.5).data_ptr() == results[0].data_ptr()


@torch.no_grad()
def test_products_that_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random(4, 6), random(6, 5)
    with Operands() as operands:
        products.matmul(a.double(), b.double())
        products.matmul(a.bfloat16(), b.bfloat16())
        products.matmul(a.to("meta"), b.to("meta"))
        products.matmul(a[0], b)
        with FakeTensorMode() as mode:
            products.matmul(mode.from_tensor(a), mode.from_tensor(b))
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x6 and 5x6\)"):
            products.matmul(a, b.t())
        with pytest.raises(RuntimeError, match="same dtype"):
            products.matmul(a, b.double())
        for owner, name, value in (
            (products, "LEAST_MULTIPLICATIONS", 4 * 6 * 5 + 1),
            (products, "PREFERS_ONEDNN", False),
            (torch.backends.mkldnn, "enabled", False),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value)
                products.matmul(a, b)
        assert not operands.found
        monkeypatch.setattr(products, "LEAST_MULTIPLICATIONS", 4 * 6 * 5)
        products.matmul(a, b)
        assert operands.found == [(4, 6, 5, 6)]


@torch.no_grad()
def test_parts_of_matrices_are_copied_first() -> None:
    whole = random(8, 12)
    for dense in (whole, whole.t(), whole[2:5], random(2, 3, 4)):
        assert products._dense(dense) is dense
    for part in (whole[:, 2:7], whole[:, 2:7].t(), whole[::2], random(2, 3, 4).mT):
        assert products._dense(part).is_contiguous()
        assert products._dense(part).equal(part)
    with Operands() as operands:
        products.matmul(whole[:, 2:7], whole[1:6, 3:9])
        products.add_product(whole[:, :3], random(9, 8)[:5].t(), random(5, 9)[:, 4:7])
        products.linear(random(2, 4, 3).mT, whole[:, 3:7])
    assert len(operands.found) == 3


@pytest.mark.parametrize(
    ("listed", "capability", "prefers"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", False),
        ("vendor_id\t: GenuineIntel\n", "AVX512", False),
        ("CPU implementer\t: 0x41\n", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_processors_with_faster_products(
    listed: str | None, capability: str, prefers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if listed is not None:
        path.write_text(listed)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products._prefers_onednn(path) is prefers
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not products._prefers_onednn(path)
