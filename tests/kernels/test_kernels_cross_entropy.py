"""Cross-entropy of a whole vocabulary in PyTorch, in blocks of rows, against PyTorch's own."""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounding import DEVICE, DTYPES, UNITS, assert_rounded, numbers_below, random
from torch import Tensor

import megalite_kernels

COUNT, VOCABULARY, SCALE = 13, 40, 0.37
cross_entropy = partial(megalite_kernels.cross_entropy, backend="torch")


def _logits(dtype: torch.dtype) -> Tensor:
    return random(COUNT, VOCABULARY, dtype=dtype, seed=0, scale=4.0)


def _targets() -> Tensor:
    """The ends of the vocabulary and of its quarters among them."""
    edges = torch.tensor([0, 9, 10, 19, 20, 29, 30, 39], device=DEVICE)
    return torch.cat((edges, numbers_below(VOCABULARY, COUNT - 8, seed=1)))


def _reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of SCALE · loss, in float64."""
    wide = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(wide, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss * SCALE, wide)
    return loss.detach(), gradient


@pytest.mark.parametrize("rows", [1, 5, COUNT, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megalite_kernels.cross_entropy"], "ROWS", rows)
    logits, targets = _logits(dtype), _targets()
    exact, gradient = _reference(logits, targets)
    lse = logits.double().logsumexp(1)
    probability = (logits.double() - lse[:, None]).exp()
    terms = lse.abs() + logits.double().abs().amax(1) + 1

    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, targets)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert abs(loss.item() - exact.item()) <= terms.sum().item() * (VOCABULARY + COUNT + 4) * UNITS[loss.dtype]

    (loss * SCALE).backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    # An error of the exponent is an error relative to the exponential; a term that cancels is at most 1.
    magnitude = (probability + F.one_hot(targets, VOCABULARY)) * terms[:, None] * SCALE
    assert_rounded(x.grad, gradient, magnitude, outer=1, inner=VOCABULARY + 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_every_row(dtype: torch.dtype) -> None:
    """Errors of one row do not hide behind those of the others, which may have another sign."""
    logits, targets = _logits(dtype), _targets()
    wide = logits.double()
    exact = F.cross_entropy(wide, targets, reduction="none")
    found = [cross_entropy(*row) for row in zip(logits.split(1), targets.split(1), strict=True)]
    terms = wide.logsumexp(1).abs() + wide.abs().amax(1) + 1
    assert_rounded(torch.stack(found), exact, terms, outer=0, inner=VOCABULARY + 4)


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0]], device=DEVICE, requires_grad=True)
    loss = cross_entropy(x, torch.tensor([1], device=DEVICE))
    loss.backward()
    assert loss.item() == 2e4
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_backward_overwrites_the_logits() -> None:
    """That is what saves a second tensor as large as the logits; forward leaves them alone."""
    weight = torch.ones(VOCABULARY, dtype=torch.float64, device=DEVICE, requires_grad=True)
    before = _logits(torch.float64)
    logits = before * weight
    loss = cross_entropy(logits, _targets())
    assert torch.equal(logits, before)
    (loss * SCALE).backward()
    torch.testing.assert_close(logits.detach(), _reference(before, _targets())[1], rtol=0, atol=1e-14)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, (before * logits.detach()).sum(0))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_second_backward_is_refused(retain_graph: bool) -> None:
    loss = cross_entropy(_logits(torch.float32).requires_grad_(), _targets())
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="overwrote the logits"):
        loss.backward()


def test_second_derivative_is_refused() -> None:
    x = _logits(torch.float32).requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(x * 1, _targets()), x, create_graph=True)
    assert not gradient.requires_grad
    (gradient,) = torch.autograd.grad(cross_entropy(x * 1, _targets()).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_no_gradient_wanted() -> None:
    with torch.no_grad():
        loss = cross_entropy(_logits(torch.float64), _targets())
    torch.testing.assert_close(loss, _reference(_logits(torch.float64), _targets())[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("wrong", [-100, -1, VOCABULARY])
def test_target_outside_the_vocabulary(wrong: int) -> None:
    targets = _targets()
    expected = _reference(_logits(torch.float64), targets)[1]
    targets[3] = wrong
    x = _logits(torch.float64).requires_grad_()
    loss = cross_entropy(x, targets)
    (loss * SCALE).backward()
    assert x.grad is not None
    _assert_nan_in_row_3(loss, x.grad, expected)


def _assert_nan_in_row_3(loss: Tensor, gradient: Tensor, expected: Tensor) -> None:
    others = torch.arange(COUNT, device=DEVICE) != 3
    assert loss.isnan()
    assert gradient[3].isnan().all()
    torch.testing.assert_close(gradient[others], expected[others], rtol=0, atol=1e-12)
