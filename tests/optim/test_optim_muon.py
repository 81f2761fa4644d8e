"""Muon on whole matrices: against torch.optim.Muon, and against the rule written down once more."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megalite.optim import muon
from megalite.optim.muon import Muon, MuonWithAdamW
from megalite.optim.newton_schulz import COEFFICIENTS
from megalite.optim.states import DeviceStates, HostStates, States
from megalite_kernels import FusedAdamW

SHAPES = [(8, 16), (16, 8), (12, 12), (1, 5), (5, 1), (1, 1), (3, 40)]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 4) -> None:
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize(("rule", "adjust"), [("match_rms_adamw", "match_rms_adamw"), ("spectral", "original")])
def test_steps_are_bitwise_those_of_torch(rule: str, adjust: Any, nesterov: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    one, other = Muon(ours, scale=rule, **options), torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    with patch.object(muon, "working_dtype", lambda *_: torch.bfloat16):  # torch orthogonalizes in nothing else
        train(one, ours)
    train(other, theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(one.state[mine]["momentum_buffer"], other.state[its]["momentum_buffer"])


def by_hand(weights: list[Tensor], steps: int, lr: float, decay: float, momentum: float) -> list[Tensor]:
    """The rule of Jordan's post: momentum as a sum, and the polynomial on singular values."""
    sums = [torch.zeros_like(weight) for weight in weights]
    stand_ins = [nn.Parameter(weight.clone()) for weight in weights]
    a, b, c = COEFFICIENTS
    for step in range(steps):
        set_gradients(stand_ins, step)
        for weight, total, stand_in in zip(weights, sums, stand_ins, strict=True):
            assert stand_in.grad is not None
            total.mul_(momentum).add_(stand_in.grad)
            u, s, v = torch.linalg.svd(stand_in.grad + momentum * total, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = a * s + b * s**3 + c * s**5
            weight.copy_(weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * (u @ s.diag() @ v))
    return weights


def test_steps_are_the_rule() -> None:
    params = parameters()
    expected = by_hand([param.detach().clone() for param in params], 4, 0.02, 0.3, 0.95)
    train(Muon(params, lr=0.02, weight_decay=0.3), params)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-12)


def test_groups_have_settings_of_their_own() -> None:
    together, apart = parameters(), parameters()
    settings: list[dict[str, Any]] = [{"lr": 0.02, "steps": 3}, {"scale": "spectral", "nesterov": False}]
    halves = [{"params": together[i::2], **options} for i, options in enumerate(settings)]
    train(Muon(halves), together)
    for i, options in enumerate(settings):
        half = Muon(apart[i::2], **options)
        for step in range(4):
            set_gradients(apart, step)
            half.step()
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_step_changes_nothing(poison: float) -> None:
    params, expected = parameters(), parameters()
    optimizer, other = Muon(params), Muon(expected)
    for step in range(3):
        set_gradients(params, step)
        optimizer.found_inf = torch.tensor([float(step == 1)])
        if step == 1:
            for param in params:
                param.grad.fill_(poison)
        optimizer.step()
        if step != 1:
            set_gradients(expected, step)
            other.step()
    for param, same in zip(params, expected, strict=True):
        assert torch.equal(param, same)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], other.state[same]["momentum_buffer"])


def test_a_bad_first_step_leaves_a_momentum_of_zero() -> None:
    params = parameters()
    optimizer = Muon(params)
    optimizer.found_inf = torch.ones(1)
    train(optimizer, params, steps=1)
    assert not any(optimizer.state[param]["momentum_buffer"].any() for param in params)


def test_clipping_multiplies_gradients_and_leaves_them_alone() -> None:
    params, expected = parameters(), parameters()
    optimizer, other = Muon(params), Muon(expected)
    optimizer.clip = torch.tensor(0.25)
    set_gradients(params, 0)
    grads = [param.grad.clone() for param in params]
    for param, grad in zip(expected, grads, strict=True):
        param.grad = grad / 4
    optimizer.step()
    other.step()
    for param, same, grad in zip(params, expected, grads, strict=True):
        assert torch.equal(param.grad, grad)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], other.state[same]["momentum_buffer"])


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params, expected = parameters(), parameters()
    optimizer = Muon(params)
    set_gradients(params, 0)
    for param in params[::2]:
        param.grad = None
    optimizer.step()
    for number, (param, same) in enumerate(zip(params, expected, strict=True)):
        assert torch.equal(param, same) == (number % 2 == 0)
        assert (param in optimizer.state) == (number % 2 == 1)


def test_nothing_to_do() -> None:
    optimizer = Muon([{"params": []}])
    optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": "original"}, "scale 'original' is none of match_rms_adamw, spectral"),
        ({"momentum": 1.0}, "momentum"),
        ({"steps": 0}, "steps 0"),
        ({"params": [nn.Parameter(torch.zeros(3))]}, "matrices"),
        ({"params": [nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3).double())]}, "one data type"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(**{"params": parameters(), **wrong})


@pytest.fixture
def both() -> tuple[MuonWithAdamW, list[nn.Parameter]]:
    params = parameters()
    first, second = Muon(params[::2], lr=0.02), FusedAdamW(params[1::2], lr=0.01)
    return MuonWithAdamW(first, second), params


def test_together_they_do_what_each_does(both: tuple[MuonWithAdamW, list[nn.Parameter]]) -> None:
    optimizer, params = both
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    train(optimizer, params)
    apart = parameters()
    for each in (Muon(apart[::2], lr=0.02), FusedAdamW(apart[1::2], lr=0.01)):
        train(each, apart)
    assert all(torch.equal(one, other) for one, other in zip(params, apart, strict=True))
    assert len(seen) == 4
    assert [set(optimizer.state[param]) for param in params[:2]] == [
        {"momentum_buffer"},
        {"exp_avg", "exp_avg_sq", "step"},
    ]
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


def test_together_they_see_rates_verdicts_and_states_that_are_set(
    both: tuple[MuonWithAdamW, list[nn.Parameter]],
) -> None:
    optimizer, params = both
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    before = [param.detach().clone() for param in params]
    train(optimizer, params, 1)
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.found_inf, optimizer.clip = torch.ones(1), torch.tensor(0.5)
    train(optimizer, params, 1)
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    optimizer.state[params[0]]["momentum_buffer"] = torch.full_like(params[0], 7.0)
    optimizer.found_inf = None
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["momentum_buffer"].mean() > 6
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("states", [DeviceStates, HostStates])
def test_a_stack_is_updated_as_its_matrices_are(states: Callable[[], States]) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 2, 6, 10, generator=generator, dtype=torch.float64)
    stack, apart = nn.Parameter(whole.clone()), [nn.Parameter(each.clone()) for each in whole.flatten(0, 1)]
    together, separate = Muon([stack], lr=0.02, states=states()), Muon(apart, lr=0.02)
    for step in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator, dtype=torch.float64)
        for param, grad in zip(apart, stack.grad.flatten(0, 1), strict=True):
            param.grad = grad.clone()
        for optimizer in (together, separate):
            optimizer.found_inf = torch.tensor([float(step == 1)])
            optimizer.step()
    assert torch.equal(stack.flatten(0, 1), torch.stack([*apart]))
    momenta = [separate.states_of(param)["momentum_buffer"] for param in apart]
    assert torch.equal(together.states_of(stack)["momentum_buffer"].flatten(0, 1), torch.stack(momenta))
    assert not torch.equal(stack, whole)
