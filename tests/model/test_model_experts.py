"""A layer's experts against another implementation: loops over tokens and experts, which autograd differentiates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.layers import Mixture, Router, SwiGLU
from megalite.config.schema import Kernels
from megalite.distributed.mesh import Mesh
from megalite.model.experts import Experts
from megalite.model.router import Losses
from megalite.parallel import experts as products
from megalite.parallel.parameter import part
from megalite.plan.parts.experts import ExpertsPart

WIDTH, LENGTH, SEQUENCES, SHARE = 16, 6, 3, 0.25
TORCH = Kernels.all("torch")
BOTH = {"balance_loss": 0.3, "z_loss": 0.05}
KINDS = {
    "softmax": Mixture(5, 2, 7),
    "softmax, not normalized": Mixture(5, 2, 7, Router(normalize=False)),
    "softmax, both losses": Mixture(5, 2, 7, Router(**BOTH)),
    "sigmoid": Mixture(5, 3, 7, Router("sigmoid")),
    "sigmoid, not normalized, scaled": Mixture(5, 3, 7, Router("sigmoid", normalize=False, scale=2.5)),
    "sigmoid, scaled, both losses": Mixture(5, 3, 7, Router("sigmoid", scale=0.5, **BOTH)),
    "one of several": Mixture(4, 1, 7),  # the score of a single expert is 1, and has no gradient
    "one of several, not normalized, balance loss": Mixture(4, 1, 7, Router(normalize=False, balance_loss=0.3)),
    "one of several, sigmoid, z-loss": Mixture(4, 1, 7, Router("sigmoid", normalize=False, z_loss=0.1)),
    "all of them": Mixture(4, 4, 7, Router(**BOTH)),
    "all of them, sigmoid": Mixture(4, 4, 7, Router("sigmoid", scale=3.0)),
    "groups, softmax": Mixture(6, 2, 7, Router(groups=3, active_groups=1, normalize=False, **BOTH)),
    "groups, sigmoid, corrected": Mixture(
        8, 3, 7, Router("sigmoid", scale=2.5, groups=4, active_groups=2, correction_rate=0.01, balance_loss=0.3)
    ),
    "corrected, softmax": Mixture(5, 2, 7, Router(correction_rate=0.01)),
    "a shared one": Mixture(5, 2, 7, shared=SwiGLU(6)),
    "a shared one with a gate": Mixture(5, 2, 7, Router("sigmoid"), SwiGLU(6), shared_gate=True),
    "clamped": Mixture(5, 2, 7, clamped=True),
    "biases": Mixture(5, 2, 7, biases=True),
    "biases, clamped, sigmoid, scaled, both losses": Mixture(
        5, 3, 7, Router("sigmoid", scale=0.5, **BOTH), clamped=True, biases=True
    ),
    "in turn": Mixture(5, 2, 7, Router(force_balance=True, **BOTH)),
}


class Weights(NamedTuple):
    """Weights and biases of a router and of its experts, and weights of a shared one."""

    router: Tensor
    router_bias: Tensor
    gate: Tensor
    gate_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    shared: Sequence[Tensor] = ()  # gate, up, down
    shared_gate: Tensor | None = None

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> "Weights":
        """The parameters of a module by name, with biases of 0 where it has none."""
        found = []
        for name in ("router", "experts.gate", "experts.up", "experts.down"):
            weight = tensors[f"{name}.weight"]
            found += [weight, tensors.get(f"{name}.bias", weight.new_zeros(weight.shape[:-1]))]
        shared = [tensor for name, tensor in tensors.items() if name.startswith("shared.")]
        return Weights(*found, shared, tensors.get("shared_gate.weight"))


def made(
    kind: Mixture, mesh: Mesh, dtype: torch.dtype = torch.float64, factor: float = 1.0, kernels: Kernels = TORCH
) -> Experts:
    module = Experts(ExpertsPart(WIDTH, kind), mesh.tp, mesh.tp, kernels, factor)
    module = module.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(part(weight), std=0.5, generator=generator)
    for correction in module.buffers():
        nn.init.normal_(correction.to_local(), std=0.3, generator=generator)
    return module


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Tokens, and a gradient of their outputs."""
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, LENGTH, SEQUENCES, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return x.requires_grad_(), grad


def chosen(values: list[float], kind: Mixture, turn: int) -> list[int]:
    """The experts of a token, the best first; of equals the one with the lower index. values: by expert."""
    router = kind.router
    if router.force_balance:
        return [(turn * kind.active + place) % kind.count for place in range(kind.active)]
    size, best = kind.count // router.groups, 2 if router.scores == "sigmoid" else 1
    groups = [sum(sorted(values[at : at + size])[-best:]) for at in range(0, kind.count, size)]
    allowed = sorted(range(router.groups), key=lambda group: (-groups[group], group))[: router.active_groups]
    experts = [expert for expert in range(kind.count) if expert // size in allowed]
    return sorted(experts, key=lambda expert: (-values[expert], expert))[: kind.active]


def swiglu(gate: Tensor, up: Tensor, down: Tensor, token: Tensor) -> Tensor:
    hidden = gate @ token
    return down @ (hidden / (1 + (-hidden).exp()) * (up @ token))


def looped(
    x: Tensor, weights: Weights, kind: Mixture, factor: float = 1.0, corrections: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """The output, and the sum over tokens of both losses."""
    router, sequences = kind.router, []
    losses = torch.zeros((), dtype=torch.float64)
    for sequence in range(x.shape[1]):
        outputs, all_shares, counts = [], [], [0] * kind.count
        for place in range(len(x)):
            token = x[place, sequence]
            logits = torch.stack([torch.dot(row, token) for row in weights.router]) + weights.router_bias
            scores = torch.stack([1 / (1 + (-z).exp()) if router.scores == "sigmoid" else z.exp() for z in logits])
            if router.scores == "softmax":
                scores = scores / scores.sum()
            values = (
                [score + by for score, by in zip(scores.tolist(), corrections, strict=True)] if corrections else None
            )
            mine = chosen(values or logits.tolist(), kind, place * x.shape[1] + sequence)
            total = sum(scores[expert] for expert in mine) if router.normalize else 1.0
            output = torch.zeros(WIDTH, dtype=torch.float64)
            for expert in mine:
                gate = weights.gate[expert] @ token + weights.gate_bias[expert]
                up = weights.up[expert] @ token + weights.up_bias[expert]
                hidden = gate / (1 + (-gate).exp()) * up
                if kind.clamped:
                    gate, up = torch.where(gate > 7, 7.0, gate), torch.where(up.abs() > 7, 7 * up.sign(), up)
                    hidden = gate / (1 + (-1.702 * gate).exp()) * (1 + up)
                made = weights.down[expert] @ hidden + weights.down_bias[expert]
                output = output + router.scale * scores[expert] / total * factor * made
                counts[expert] += 1
            if weights.shared:
                share = 1.0 if weights.shared_gate is None else 1 / (1 + (-(weights.shared_gate @ token)).exp())
                output = output + share * factor * swiglu(*weights.shared, token)
            outputs.append(output)
            all_shares.append(scores / scores.sum())
            losses = losses + router.z_loss * logits.exp().sum().log() ** 2
        for shares in all_shares:
            for expert, count in enumerate(counts):
                frequency = count / (kind.active * len(x))
                losses = losses + router.balance_loss * kind.count * frequency * shares[expert]
        sequences.append(torch.stack(outputs))
    return torch.stack(sequences, dim=1), losses


class Found(NamedTuple):
    """An output, and gradients."""

    output: Tensor
    of_x: Tensor
    of_weights: list[Tensor]


def expected(module: Experts, kind: Mixture, x: Tensor, grad: Tensor, factor: float = 1.0) -> Found:
    names = [name for name, _ in module.named_parameters()]
    x, weights = x.detach().double().requires_grad_(), [part(each).detach().double() for each in module.parameters()]
    corrections = [number for each in module.buffers() for number in each.to_local().tolist()]
    named = {name: weight.requires_grad_() for name, weight in zip(names, weights, strict=True)}
    output, losses = looped(x, Weights.of(named), kind, factor, corrections)
    objective = (output * grad.double()).sum() + SHARE * losses
    of_x, *of_weights = torch.autograd.grad(objective, [x, *weights], materialize_grads=True)
    return Found(output.detach(), of_x, of_weights)


def found(module: Experts, x: Tensor, grad: Tensor) -> Found:
    output = module(x, Losses(SHARE))
    output.backward(grad)
    assert x.grad is not None
    return Found(output.detach(), x.grad, [weight.grad.to_local() for weight in module.parameters()])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_all_numbers_are_those_of_loops(name: str, factor: float, alone: Mesh) -> None:
    kind, (x, grad) = KINDS[name], tokens()
    module = made(kind, alone, factor=factor)
    reference = expected(module, kind, x, grad, factor)
    torch.testing.assert_close(found(module, x, grad), reference, rtol=1e-12, atol=1e-12)
    assert all(gradient.any() for gradient in reference.of_weights) or name == "one of several"


def test_a_loss_changes_no_output(alone: Mesh) -> None:
    x, _ = tokens()
    kinds = Mixture(5, 2, 7), Mixture(5, 2, 7, Router(**BOTH))
    assert torch.equal(*(made(kind, alone)(x) for kind in kinds))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_of_experts_that_suit_a_token_equally_well_the_first_are_chosen(scores: str, alone: Mesh) -> None:
    """With 40 experts: an order that is not stable shows itself beyond a few."""
    kind, (x, grad) = Mixture(40, 3, 7, Router(scores, **BOTH)), tokens()
    module = made(kind, alone)
    rows = part(module.router.weight)
    with torch.no_grad():
        x.round_()  # so that logits are exact
        rows.mul_(4).round_().div_(4)
        rows[1::2] = rows[1]  # the better half and the worse half of all tokens' experts are alike
        rows[::2] = rows[0]
    _, experts = module.router(x, Losses())
    assert {tuple(each) for each in experts.flatten(0, 1).tolist()} == {(0, 2, 4), (1, 3, 5)}
    torch.testing.assert_close(found(module, x, grad), expected(module, kind, x, grad), rtol=1e-12, atol=1e-12)


def starved(module: Experts) -> list[int]:
    """No token chooses the third expert."""
    part(module.router.weight)[2] = 0
    return [0, 1, 3, 4]


def crowded(module: Experts) -> list[int]:
    """All tokens choose the last two."""
    part(module.router.weight)[:-2] = 0
    return [3, 4]


@pytest.mark.parametrize("change", [starved, crowded])
@pytest.mark.parametrize("grouped", [False, True])
def test_an_expert_without_tokens_has_gradients_of_zero(
    change: Callable[[Experts], list[int]], grouped: bool, alone: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if grouped else torch.float64
    monkeypatch.setattr(products, "_has_grouped_products", lambda *_: grouped)
    kind, (x, grad) = Mixture(5, 2, 16, Router(z_loss=0.05), biases=True), tokens(dtype)
    module = made(kind, alone, dtype)
    with torch.no_grad():
        busy = change(module)
        x[..., 0] = 20  # so that the first column decides which experts are chosen
        part(module.router.weight)[:, 0] = torch.tensor([float(expert in busy) for expert in range(kind.count)])
    _, experts = module.router(x, Losses())
    assert experts.unique().tolist() == busy
    reference, numbers = expected(module, kind, x, grad), found(module, x, grad)
    tolerance = 0.05 if grouped else 1e-12
    for gradient, correct in zip(numbers.of_weights, reference.of_weights, strict=True):
        apart = (gradient.double() - correct).norm() / correct.norm()
        assert apart <= tolerance
    for gradient in numbers.of_weights[2:]:
        assert [expert for expert in range(kind.count) if gradient[expert].any()] == busy


def test_bf16_is_near_and_the_router_is_in_float32(alone: Mesh) -> None:
    kind, (x, grad) = Mixture(5, 2, 7, Router(**BOTH)), tokens(torch.bfloat16)
    module = made(kind, alone, torch.bfloat16)
    scores, experts = module.router(x, Losses())
    logits = x.detach().float() @ part(module.router.weight).detach().float().t()
    assert scores.dtype == torch.float32
    assert torch.equal(experts, logits.topk(2).indices)
    torch.testing.assert_close(scores.detach(), logits.topk(2).values.softmax(-1), rtol=1e-6, atol=1e-6)
    reference, numbers = expected(module, kind, x, grad), found(module, x, grad)
    pairs = zip([numbers.output, numbers.of_x, *numbers.of_weights], [*reference[:2], *reference[2]], strict=True)
    for number, correct in pairs:
        assert number.dtype == torch.bfloat16
        assert (number.double() - correct).norm() <= 2**-6 * correct.norm()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_corrections_stay_wide_where_weights_are_narrow(scores: str, alone: Mesh) -> None:
    """Near 3, numbers of bf16 are 2⁻⁶ apart; these corrections differ by less, and alone decide what is chosen."""
    x, _ = tokens(torch.bfloat16)
    module = made(Mixture(5, 2, 7, Router(scores, correction_rate=0.001)), alone, torch.float32)
    with torch.no_grad():
        part(module.router.weight).zero_()
    corrections = torch.tensor([3.001, 3.003, 3.002, 3.005, 3.004])
    module.router.correction.to_local().copy_(corrections)
    module.to(torch.bfloat16)
    assert module.router.correction.to_local().equal(corrections)
    assert {tuple(each) for each in module.router(x, Losses())[1].flatten(0, 1).tolist()} == {(3, 4)}
    module.to(torch.float64)
    assert module.router.correction.dtype == torch.float64


def test_an_expert_with_its_share_of_tokens_stays_as_it_is(alone: Mesh) -> None:
    router = made(Mixture(6, 2, 7, Router(correction_rate=0.25)), alone).router
    router.correction.to_local().zero_()
    router.correct(torch.tensor([5, 3, 4, 0, 3, 3]), torch.tensor(1.0))
    assert router.correction.to_local().tolist() == [-0.25, 0, -0.25, 0.25, 0, 0]
    router.correct(torch.tensor([5, 3, 4, 0, 3, 3]), torch.tensor(0.0))
    assert router.correction.to_local().tolist() == [-0.25, 0, -0.25, 0.25, 0, 0]


def test_an_evaluation_is_a_forward_pass_without_counts(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = tokens()
    module = made(Mixture(5, 2, 7, Router(**BOTH)), alone)
    trained = module(x)
    monkeypatch.setattr("megalite.model.router.rows_of_experts", None)
    with torch.no_grad():
        assert torch.equal(module(x), trained)


@pytest.mark.parametrize("name", ["softmax", "biases"])
def test_modules_have_the_weights_that_plans_name(name: str, alone: Mesh) -> None:
    kind = KINDS[name]
    module, planned = made(kind, alone), dict(ExpertsPart(WIDTH, kind).weights())
    assert {name: tuple(weight.shape) for name, weight in module.named_parameters()} == {
        name: weight.shape for name, weight in planned.items()
    }
    used = replace(kind, count=kind.active)
    assert sum(each.active for name, each in planned.items() if name.startswith("experts")) == sum(
        each.elements for name, each in ExpertsPart(WIDTH, used).weights() if name.startswith("experts")
    )


class Called(TorchDispatchMode):
    """Names of megalite's operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megalite":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["softmax, both losses", "sigmoid, not normalized, scaled", "one of several"])
def test_kernels_are_those_of_the_key(name: str, alone: Mesh) -> None:
    kind, names = KINDS[name], {"spread_rows", "collect_rows", "weighted_swiglu", "weighted_swiglu_backward"}
    x, grad = tokens()
    reference = expected(made(kind, alone), kind, x, grad)
    for kernels, called in ((Kernels(experts="torch"), set()), (Kernels(experts="triton"), names)):
        x, grad = tokens()
        with Called() as calls:
            numbers = found(made(kind, alone, kernels=kernels), x, grad)
        assert calls.names == called
        torch.testing.assert_close(numbers, reference, rtol=1e-12, atol=1e-12)
