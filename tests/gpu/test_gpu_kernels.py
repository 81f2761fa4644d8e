"""Kernels at the sizes of Llama 3 8B, and in training, on a CUDA device; `make gpu` runs it."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from exact import (
    assert_logits_gradient,
    assert_norm,
    assert_norm_gradients,
    assert_norm_turned,
    assert_norm_turned_gradients,
    assert_swiglu,
    assert_turned,
    assert_updated,
    assert_weighted_swiglu,
)
from rounding import DEVICE, UNITS, assert_rounded
from torch import Tensor

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Optim, Run, Train
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.step import train_step
from megalite_kernels import (
    adamw,
    add_rms_norm,
    collect_rows,
    cross_entropy,
    grad_norm,
    linear_cross_entropy,
    qk_norm_rope,
    rms_norm,
    rope,
    spread_rows,
    swiglu,
    weighted_swiglu,
)
from megalite_kernels.compile_cases import LLAMAS, MIXTURES, TOKENS
from megalite_kernels.linear_cross_entropy import reference as linear_cross_entropy_reference
from megalite_kernels.rope import Layout as Pairs

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device and TRITON_INTERPRET=0")

LLAMA, MIXTURE = LLAMAS["Llama 3 8B"], MIXTURES["DeepSeek-V3"]
EPS, SCALE, IGNORED = 1e-5, 0.37, -100
ROWS = 512  # that are compared at a time: in float64 all of them would not fit
ADDITIONS = 1024  # into a sum: of a program's own rows or columns, and then of programs or threads


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Made on the device, in a fraction of a second."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype).mul_(scale)


def classes(count: int) -> Tensor:
    """Targets, some of them ignored."""
    targets = torch.randint(LLAMA.vocabulary, (count,), generator=torch.Generator(DEVICE).manual_seed(9), device=DEVICE)
    targets[::7] = IGNORED
    return targets


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.detach().split(ROWS) for tensor in tensors), strict=True)


def twice(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What it returns, which a second time is the same to the last bit."""
    first, second = compute(), compute()
    assert all(map(torch.equal, first, second))
    return tuple(tensor.detach() for tensor in first)


def needs(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free memory on the device")


def test_rms_norm() -> None:
    x, dy = (normal(TOKENS, LLAMA.width, seed=seed) for seed in (0, 1))
    weight = normal(LLAMA.width, seed=2, dtype=torch.float32)  # so that its gradient is not rounded to bfloat16
    inputs = x.requires_grad_(), weight.requires_grad_()

    def compute() -> tuple[Tensor, ...]:
        y = rms_norm(*inputs, EPS)
        return y, *torch.autograd.grad(y, inputs, dy)

    y, *gradients = twice(compute)
    assert_norm(y, x.detach(), weight.detach(), EPS)
    assert_norm_gradients(*gradients, x.detach(), weight.detach(), EPS, dy, additions=ADDITIONS)


def test_add_rms_norm() -> None:
    x, y, dnormal, dtotal = (normal(TOKENS, LLAMA.width, seed=seed) for seed in range(4))
    weight = normal(LLAMA.width, seed=4, dtype=torch.float32)
    inputs = x.requires_grad_(), weight.requires_grad_()

    def compute() -> tuple[Tensor, ...]:
        results = add_rms_norm(x, y, weight, EPS)
        return *results, *torch.autograd.grad(results, inputs, (dnormal, dtotal))

    normed, total, *gradients = twice(compute)
    assert torch.equal(total, x + y)
    given = total, weight.detach(), EPS
    assert_norm(normed, *given)
    assert_norm_gradients(*gradients, *given, dnormal, dtotal.double(), additions=ADDITIONS)


def test_swiglu() -> None:
    gate, up, dy = (normal(TOKENS, LLAMA.ffn, seed=seed, scale=3.0) for seed in range(3))
    inputs = gate.requires_grad_(), up.requires_grad_()
    y = swiglu(*inputs)
    for block in in_blocks(y, *torch.autograd.grad(y, inputs, dy), *inputs, dy):
        assert_swiglu(*block)


@pytest.mark.parametrize("clamped", [False, True])
def test_weighted_swiglu(clamped: bool) -> None:
    gate, up, dy = (normal(MIXTURE.rows, MIXTURE.hidden, seed=seed, scale=3.0) for seed in range(3))
    scores = normal(MIXTURE.rows, seed=3, dtype=torch.float32)
    inputs = gate.requires_grad_(), up.requires_grad_(), scores.requires_grad_()

    def compute() -> tuple[Tensor, ...]:
        y = weighted_swiglu(*inputs, clamped=clamped)
        return y, *torch.autograd.grad(y, inputs, dy)

    for block in in_blocks(*twice(compute), *inputs, dy):
        assert_weighted_swiglu(*block, clamped=clamped)


def test_rows_of_experts() -> None:
    x, rows = (normal(count, MIXTURE.width, seed=seed) for seed, count in enumerate((TOKENS, MIXTURE.rows)))
    places = torch.randperm(MIXTURE.rows, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)
    places = places.view(TOKENS, MIXTURE.active)
    (spread,) = twice(lambda: (spread_rows(x, places),))
    assert all(torch.equal(spread[each], x) for each in places.unbind(1))
    (collected,) = twice(lambda: (collect_rows(rows, places),))
    for found, of_tokens in in_blocks(collected, places):
        terms = rows[of_tokens].double()
        assert_rounded(found, terms.sum(1), terms.abs().sum(1), outer=1, inner=MIXTURE.active)


def angles() -> tuple[Tensor, Tensor]:
    frequencies = 500_000.0 ** -torch.linspace(0, 1, LLAMA.head_size // 2 + 1, dtype=torch.float64, device=DEVICE)[:-1]
    turns = torch.arange(TOKENS, device=DEVICE)[:, None, None, None] * frequencies
    return turns.cos().float(), turns.sin().float()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope(layout: Pairs) -> None:
    cos, sin = angles()
    for heads in (LLAMA.heads, LLAMA.kv_heads):
        x, dy = (normal(TOKENS, 1, heads, LLAMA.head_size, seed=seed) for seed in (0, 1))
        y = rope(x.requires_grad_(), cos, sin, layout=layout)
        (dx,) = torch.autograd.grad(y, x, dy)
        for found, value, cosines, sines in (*in_blocks(y, x, cos, sin), *in_blocks(dx, dy, cos, -sin)):
            assert_turned(found, value, cosines, sines, layout)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_qk_norm_rope(layout: Pairs) -> None:
    cos, sin = angles()
    x, dy = (normal(TOKENS, 1, LLAMA.heads, LLAMA.head_size, seed=seed) for seed in (0, 1))
    weight = normal(LLAMA.head_size, seed=2, dtype=torch.float32)
    inputs = x.requires_grad_(), weight.requires_grad_()

    def compute() -> tuple[Tensor, ...]:
        y = qk_norm_rope(*inputs, cos, sin, EPS, layout=layout)
        return y, *torch.autograd.grad(y, inputs, dy)

    y, *gradients = twice(compute)
    given = x.detach(), weight.detach(), cos, sin, EPS, layout
    assert_norm_turned(y, *given)
    assert_norm_turned_gradients(*gradients, *given, dy, additions=ADDITIONS)


@pytest.mark.parametrize("tokens", [TOKENS, 20_000])  # 20 000 tokens have more than 2³¹ logits
def test_cross_entropy(tokens: int) -> None:
    needs(32)
    logits, targets = normal(tokens, LLAMA.vocabulary, seed=0, scale=4.0), classes(tokens)

    def compute() -> tuple[Tensor, ...]:
        x = logits.clone().requires_grad_()
        loss = cross_entropy(x, targets, ignore_index=IGNORED)
        return loss, *torch.autograd.grad(loss * SCALE, x)

    loss, dx = twice(compute)
    expected = size = 0.0
    for block in in_blocks(dx, logits, targets):
        of_block, of_terms = assert_logits_gradient(*block, SCALE, ADDITIONS, ignore_index=IGNORED)
        expected, size = expected + of_block.item(), size + of_terms.item()
    assert abs(loss.item() - expected) <= 2 * size * UNITS[torch.float32] * (ADDITIONS + 16)


@pytest.mark.parametrize("chunk", [3000, TOKENS])
def test_linear_cross_entropy(chunk: int) -> None:
    needs(32)
    x = normal(TOKENS, LLAMA.width, seed=0)
    weight = normal(LLAMA.vocabulary, LLAMA.width, seed=1, scale=2.0 / LLAMA.width**0.5)
    inputs, targets = (x.requires_grad_(), weight.requires_grad_()), classes(TOKENS)
    memory = chunk * LLAMA.vocabulary * x.itemsize
    loss = linear_cross_entropy(*inputs, targets, ignore_index=IGNORED, memory=memory)
    dx, dweight = torch.autograd.grad(loss, inputs)

    expected, wide = 0.0, weight.detach().double().requires_grad_()
    for rows, labels, found in in_blocks(x, targets, dx):
        exact = rows.double().requires_grad_()
        of_rows = linear_cross_entropy_reference(exact, wide, labels, ignore_index=IGNORED)
        of_rows.backward()
        expected += of_rows.item()
        assert apart(found, exact.grad) < 2**-7
    assert apart(dweight, wide.grad) < 2**-7
    assert loss.item() == pytest.approx(expected, rel=2**-10)


def apart(found: Tensor, exact: Tensor | None) -> float:
    assert exact is not None
    return ((found.double() - exact).norm() / exact.norm()).item()


def test_adamw() -> None:
    shapes = [(LLAMA.ffn, LLAMA.width), (LLAMA.width,), (LLAMA.vocabulary // 8, LLAMA.width)]
    old = [
        [normal(*shape, seed=seed, dtype=torch.float32, scale=scale) for shape in shapes]
        for seed, scale in enumerate((1.0, 1.0, 0.1, 0.1))
    ]
    old[3] = [second.square() for second in old[3]]
    new = [[tensor.clone() for tensor in tensors] for tensors in old]
    steps = [torch.full((), 4.0, device=DEVICE) for _ in shapes]
    how: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    adamw(*new, steps, **how, backend="triton")
    for number in range(len(shapes)):
        weight, _, first, second = (tensors[number] for tensors in new)
        assert_updated((weight, first, second), *(tensors[number] for tensors in old), 5, **how)


def test_grad_norm() -> None:
    """Of a tensor of more than 2³¹ elements too, the last of which are all that is not zero."""
    needs(16)
    grads = [normal(LLAMA.ffn, LLAMA.width, seed=seed) for seed in range(5)]
    grads.append(torch.zeros(2**31 + 100, dtype=torch.bfloat16, device=DEVICE))
    grads[-1][-100:] = 100.0
    (norm,) = twice(lambda: (grad_norm(grads),))
    exact = sum(grad.double().square().sum().item() for grad in grads[:-1]) + 100 * 100.0**2
    assert norm.item() == pytest.approx(exact**0.5, rel=1e-6)


def trained(kernels: Literal["torch", "triton"], compiled: bool) -> tuple[list[float], list[Tensor]]:
    """Losses of three steps, and the weights after these."""
    config = Config(
        run=Run(device=DEVICE.type),
        model=Model(
            layers=2, width=256, heads=4, kv_heads=2, ffn=512, vocab_size=512, sequence_length=128, qk_norm=True
        ),
        parallel=Parallel(dp_shard=1),
        batch=Batch(micro=2, global_=4),
        train=Train(steps=3, precision="fp64", compile=compiled),
        optim=Optim(lr=1e-3),
        kernels=kernels,
    )
    mesh = Mesh.build(Layout(), DEVICE)
    assert mesh is not None
    torch.compiler.reset()
    job = build(resolve(config), mesh)
    losses = [train_step(job, random_batch(job, 0), step).read().loss for step in range(3)]
    return losses, [param.detach().to_local() for _, param in job.named_parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_the_same_with_kernels(one_rank: None, compiled: bool) -> None:
    expected, weights = trained("torch", compiled=False)
    losses, found = trained("triton", compiled)
    assert losses == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-9)
