"""Cross-entropy with all its options, in PyTorch and in kernels, against PyTorch's in float64."""

from typing import Any

import pytest
import torch
from exact import assert_logits_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import DEVICE, DTYPES, UNITS, far_apart, numbers_below, random
from torch import Tensor

from megalite_kernels import cross_entropy
from megalite_kernels.cross_entropy import bytes_moved, reference

SCALE = 0.37
IGNORED = -7
BACKENDS = ["torch", "triton"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": IGNORED},
    {"ignore_index": IGNORED, "label_smoothing": 0.1, "z_loss": 0.03},
    {"ignore_index": IGNORED, "label_smoothing": 0.1, "z_loss": 0.03, "softcap": 3.0},
]


def problem(count: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = random(count, classes, dtype=dtype, seed=seed, scale=4.0)
    return logits, numbers_below(classes, count, seed=seed)


def check(logits: Tensor, targets: Tensor, backend: Any, options: dict[str, Any]) -> None:
    """Loss and gradient of SCALE · loss are as near those in float64 as roundings allow."""
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x * 1, targets, backend=backend, **options)
    assert loss.dtype == torch.promote_types(logits.dtype, torch.float32)
    (loss * SCALE).backward()
    expected, terms = assert_logits_gradient(x.grad, logits, targets, SCALE, **options)
    assert abs(loss.item() - expected.item()) <= 2 * terms.item() * UNITS[loss.dtype] * (sum(logits.shape) + 16)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradient(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits, targets = problem(5, 9001, dtype)
    if options:
        targets[2] = IGNORED
    check(logits, targets, backend, options)


@settings(max_examples=30)
@given(
    count=st.integers(1, 5),
    classes=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 99),
)
def test_shapes(count: int, classes: int, dtype: torch.dtype, options: dict[str, Any], seed: int) -> None:
    check(*problem(count, classes, dtype, seed), "triton", options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: Any) -> None:
    x = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    loss = cross_entropy(x * 1, numbers_below(8, 0, seed=0), backend=backend)
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert x.grad.shape == (0, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_add_nothing_whatever_is_in_them(backend: Any) -> None:
    logits, targets = problem(4, 50, torch.float32)
    logits[1], logits[2], targets[1:3] = torch.nan, torch.inf, 3
    targets[0] = targets[3] = 5
    others = [0, 3]
    expected = cross_entropy(logits[others], targets[others])
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x * 1, targets, ignore_index=3, backend=backend)
    loss.backward()
    assert x.grad is not None
    assert x.grad[1:3].eq(0).all()
    assert x.grad[others].abs().amin() > 0
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_minus_infinity(backend: Any) -> None:
    x = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]], device=DEVICE, requires_grad=True)
    loss = cross_entropy(x * 1, torch.tensor([1], device=DEVICE), backend=backend)
    loss.backward()
    expected = torch.tensor([1.0, 2.0]).softmax(0)
    assert x.grad is not None
    torch.testing.assert_close(loss.detach().cpu(), -expected[0].log())
    torch.testing.assert_close(x.grad.cpu(), torch.tensor([[0, expected[0] - 1, 0, expected[1]]]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-100, -1, 50])
def test_other_targets_outside_the_vocabulary(wrong: int, backend: Any) -> None:
    logits, targets = problem(3, 50, torch.float64)
    targets[1] = wrong
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x * 1, targets, ignore_index=IGNORED, backend=backend)
    loss.backward()
    assert x.grad is not None
    assert loss.isnan()
    assert x.grad.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("filling", [0.0, 1e30, torch.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_no_class(backend: Any, filling: float) -> None:
    """Whatever it holds; its gradient is 0."""
    logits, targets = problem(3, 37, torch.float64)
    expected = logits.clone().requires_grad_()
    reference(expected, targets, label_smoothing=0.1).backward()
    x = torch.cat((logits, torch.full((3, 11), filling, device=DEVICE)), 1).requires_grad_()
    cross_entropy(x * 1, targets, vocabulary=37, label_smoothing=0.1, backend=backend).backward()
    assert x.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(x.grad[:, :37], expected.grad, rtol=0, atol=1e-14)
    assert x.grad[:, 37:].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_apart(backend: Any) -> None:
    """Rows of a wider tensor: what lies between them is left alone."""
    logits, targets = problem(4, 30, torch.float64)
    expected = logits.clone().requires_grad_()
    reference(expected, targets).backward()
    storage = torch.full((4, 50), 7.0, dtype=torch.float64, device=DEVICE)
    storage[:, 5:35] = logits
    x = storage[:, 5:35].detach().requires_grad_()
    cross_entropy(x, targets, backend=backend).backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=1e-14)
    torch.testing.assert_close(storage[:, 5:35], expected.grad, rtol=0, atol=1e-14)
    assert storage[:, :5].eq(7).all()
    assert storage[:, 35:].eq(7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposed_logits_and_targets_apart(backend: Any) -> None:
    logits, targets = problem(4, 30, torch.float64)
    expected = logits.clone().requires_grad_()
    reference(expected, targets).backward()
    x = logits.T.contiguous().requires_grad_()
    cross_entropy((x * 1).T, targets.repeat_interleave(3)[::3], backend=backend).backward()
    assert expected.grad is not None
    torch.testing.assert_close(x.grad, expected.grad.T, rtol=0, atol=1e-14)


def test_rows_beyond_32_bits_of_offset() -> None:
    logits, targets = problem(3, 40, torch.bfloat16)
    (far,) = far_apart(logits)
    expected = logits.clone().requires_grad_()
    cross_entropy(expected, targets, backend="triton").backward()
    x = far.requires_grad_()
    loss = cross_entropy(x, targets, backend="triton")
    loss.backward()
    assert loss == cross_entropy(logits, targets, backend="triton")
    assert torch.equal(far.detach(), expected.detach())


def test_backward_overwrites_the_logits_and_runs_once() -> None:
    logits, targets = problem(3, 20, torch.float64)
    x = logits.clone().requires_grad_()
    y = x * 1
    loss = cross_entropy(y, targets, backend="triton")
    assert torch.equal(y, logits)
    loss.backward(retain_graph=True)
    assert torch.equal(y, x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_fills_no_gradients_of_what_has_none() -> None:
    logits, targets = problem(3, 10, torch.float32)
    loss = cross_entropy(logits.requires_grad_() * 1, targets, backend="triton")
    with torch.profiler.profile() as profile:
        loss.backward()
    names = {event.name for event in profile.events()}
    assert "megalite::cross_entropy_backward" in names
    assert "aten::zeros" not in names


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logit_of_nan_shows(backend: Any) -> None:
    logits, targets = problem(3, 600, torch.float32)
    logits[1, 300] = torch.nan
    assert cross_entropy(logits, targets, backend=backend).isnan()


def test_second_derivative_is_refused() -> None:
    logits, targets = problem(3, 20, torch.float32)
    x = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(x * 1, targets, backend="triton").square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_custom_ops(smoothing: float) -> None:
    logits, targets = problem(3, 20, torch.float32)
    forward, backward = torch.ops.megalite.cross_entropy.default, torch.ops.megalite.cross_entropy_backward.default
    labels = (0, 17, 17, IGNORED, smoothing, 0.01, 0.0)
    torch.library.opcheck(forward, (logits.clone().requires_grad_(), targets % 17, "", *labels))
    lses, scales = torch.ones(3, device=DEVICE), torch.ones((), device=DEVICE).expand(3)
    torch.library.opcheck(backward, (logits, targets, lses, scales, *labels))


def test_compiled_as_one_graph() -> None:
    logits, targets = problem(3, 20, torch.float64)
    expected, x = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    reference(expected, targets).backward()
    loss = torch.compile(lambda x: cross_entropy(x * 2, targets, backend="triton"), fullgraph=True, backend="aot_eager")
    loss(x / 2).backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": range(3, 14)}, r"range\(3, 14\).*at most 10 neighbouring classes"),
        ({"columns": range(3, 9), "vocabulary": 8}, "among 8"),
        ({"columns": range(0, 10, 2)}, "neighbouring"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"backend": "cuda"}, "is no backend"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64), **options)


def test_bytes_of_8192_tokens_of_llama() -> None:
    forward, backward = bytes_moved(8192, 128256, torch.bfloat16)
    assert (forward, backward) == (pytest.approx(2.1e9, rel=0.01), pytest.approx(4.2e9, rel=0.01))
