"""Linear layer and cross-entropy in one against the two in float64; over ranks against the whole."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import SIZE, Ranks
from rounding import DEVICE, DTYPES, UNITS, assert_rounded, numbers_below, random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import collectives, group_of, shards

from megalite_kernels import cross_entropy
from megalite_kernels.labels import labels_of
from megalite_kernels.linear_cross_entropy import (
    bytes_moved,
    chunk_tokens,
    linear_cross_entropy,
    reference,
    scaled_linear_cross_entropy,
)

SCALE, IGNORED = 0.37, -7
BACKENDS = ["torch", "triton"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_index": IGNORED, "label_smoothing": 0.1, "z_loss": 0.03, "softcap": 3.0},
]


def problem(count: int, width: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = random(count, width, dtype=dtype, seed=0)
    weight = random(classes, width, dtype=dtype, seed=1, scale=2.0 / width**0.5)
    return x, weight, numbers_below(classes, count, seed=2)


def exact(x: Tensor, weight: Tensor, targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients of SCALE · loss, in float64."""
    wide = [tensor.detach().double().clone().requires_grad_() for tensor in (x, weight)]
    loss = reference(*wide, targets, **options)
    dx, dw = torch.autograd.grad(loss * SCALE, wide)
    return loss.detach(), dx, dw


def memory_of(chunk: int, classes: int, dtype: torch.dtype, ranks: int = 1) -> int:
    return chunk * -(-classes // ranks) * dtype.itemsize * min(ranks, 2)


def check(count: int, width: int, classes: int, chunk: int, dtype: torch.dtype, backend: Any, number: int) -> None:
    options = OPTIONS[number]
    x, weight, targets = problem(count, width, classes, dtype)
    if options:
        targets[count // 2] = IGNORED
    loss, dx, dw = exact(x, weight, targets, options)
    x.requires_grad_()
    weight.requires_grad_()
    memory = memory_of(chunk, classes, dtype)
    found = linear_cross_entropy(x, weight, targets, memory=memory, backend=backend, **options)
    (found * SCALE).backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert found.dtype == torch.promote_types(dtype, torch.float32)

    a, w = x.detach().double(), weight.detach().double()
    logits = a @ w.T
    if cap := options.get("softcap"):
        logits = cap * (logits / cap).tanh()
    sizes = a.abs() @ w.abs().T  # of the terms of logits, which are rounded to dtype once
    wide = UNITS[found.dtype]
    errors = sizes.amax(1) * (UNITS[dtype] + wide * width) + wide * (logits.abs().amax(1) + 9) * (classes + count)
    factor = 1 + 2 * options.get("z_loss", 0.0) * (logits.logsumexp(1).abs() + 1)
    assert abs(found.item() - loss.item()) <= 2 * (errors * factor).sum().item()
    probability = logits.softmax(1)
    # Logits' errors are relative errors of exponentials; those of the sums add as much.
    gradient = probability * factor[:, None] + torch.nn.functional.one_hot(targets.clamp(0), classes) + 1 / classes
    spread = 2 * errors[:, None] * probability * factor[:, None] / UNITS[dtype]
    spread = (spread + gradient) * SCALE
    assert_rounded(x.grad, dx, spread @ w.abs(), outer=4, inner=classes + 8)
    assert_rounded(weight.grad, dw, spread.T @ a.abs(), outer=4, inner=count + 8)


@pytest.mark.parametrize("number", range(len(OPTIONS)))
@pytest.mark.parametrize("chunk", [3, 4, 11, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients(backend: str, dtype: torch.dtype, chunk: int, number: int) -> None:
    check(11, 24, 70, chunk, dtype, backend, number)


@settings(max_examples=15)
@given(
    count=st.integers(1, 9),
    width=st.integers(1, 40),
    classes=st.integers(1, 90),
    chunk=st.integers(1, 12),
    dtype=st.sampled_from(DTYPES),
    number=st.sampled_from(range(len(OPTIONS))),
)
def test_shapes(count: int, width: int, classes: int, chunk: int, dtype: torch.dtype, number: int) -> None:
    check(count, width, classes, chunk, dtype, "triton", number)


@pytest.mark.parametrize("chunk", [3, 11])
def test_float64_is_exact(chunk: int) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    loss, dx, dw = exact(x, weight, targets, OPTIONS[1])
    memory = memory_of(chunk, 70, torch.float64)
    found = linear_cross_entropy(
        x.requires_grad_(), weight.requires_grad_(), targets, memory=memory, backend="triton", **OPTIONS[1]
    )
    (found * SCALE).backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(x.grad, dx, rtol=0, atol=1e-13)
    torch.testing.assert_close(weight.grad, dw, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [3, 11])
def test_losses_of_tokens_may_have_factors(chunk: int, backend: Any) -> None:
    """The gradients are those of the weighted sum of losses, and the losses beside it those of each token."""
    x, weight, targets = problem(11, 24, 70, torch.float64)
    targets[5] = IGNORED
    scales = random(11, dtype=torch.float64, seed=4)
    wide = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    each = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, ignore_index=IGNORED, reduction="none")
    expected = torch.autograd.grad((each * scales).sum() * SCALE, wide)
    total, found = scaled_linear_cross_entropy(
        x.requires_grad_(),
        weight.requires_grad_(),
        targets,
        scales,
        memory=memory_of(chunk, 70, torch.float64),
        ignore_index=IGNORED,
        backend=backend,
    )
    (total * SCALE).backward()
    assert not found.requires_grad
    torch.testing.assert_close(found, each.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(total.detach(), (each * scales).sum().detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(x.grad, expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(weight.grad, expected[1], rtol=0, atol=1e-13)


def test_weight_gradients_are_summed_in_float32() -> None:
    """256 chunks of one token, each adding half a unit of bfloat16 of the sum so far or less, which bf16 would lose."""
    count = 512
    x = torch.ones(count, 1, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    linear_cross_entropy(x, weight, numbers_below(1, count, seed=0), memory=4).backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [-count / 2, count / 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [4, 11])
def test_a_wide_gradient_of_the_weight_is_rounded_to_float32_alone(chunk: int, backend: Any) -> None:
    x, weight, targets = problem(11, 24, 70, torch.bfloat16)
    found = []
    for wide in (False, True):
        leaf = weight.clone().requires_grad_()
        leaf.grad_dtype = None
        memory = memory_of(chunk, 70, torch.bfloat16)
        loss = linear_cross_entropy(x, leaf, targets, memory=memory, wide_gradient=wide, backend=backend)
        (loss * SCALE).backward()
        found.append(leaf.grad)
    rounded, wide_gradient = found
    assert (rounded.dtype, wide_gradient.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(wide_gradient.bfloat16(), rounded, rtol=2**-7, atol=1e-5)  # one chunk: other sums
    assert wide_gradient.bfloat16().float().ne(wide_gradient).any()


@pytest.mark.parametrize("chunk", [4, 11])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients(wanted: tuple[bool, bool], chunk: int) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    loss, *gradients = exact(x, weight, targets, {})
    inputs = [tensor.requires_grad_(want) for tensor, want in zip((x, weight), wanted, strict=True)]
    found = linear_cross_entropy(*inputs, targets, memory=memory_of(chunk, 70, torch.float64))
    torch.testing.assert_close(found.detach(), loss)
    assert found.requires_grad == any(wanted)
    if any(wanted):
        (found * SCALE).backward()
    for tensor, want, gradient in zip(inputs, wanted, gradients, strict=True):
        if want:
            torch.testing.assert_close(tensor.grad, gradient)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_needs_a_target(backend: Any) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float32)
    for function, inputs in ((linear_cross_entropy, (x, weight)), (cross_entropy, (x @ weight.T,))):
        with pytest.raises(ValueError, match=r"targets \[5\] must be \[11\], one for each row"):
            function(*inputs, targets[:5], backend=backend)


@pytest.mark.parametrize("chunk", [4, 11])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_product_is_a_term_of_the_logits(frozen: bool, backend: Any, chunk: int) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    z, second, _ = problem(11, 3, 70, torch.float64)
    loss, dx, dw = exact(torch.cat((x, z), 1), torch.cat((weight, second), 1), targets, OPTIONS[1])
    leaves = [tensor.requires_grad_() for tensor in (x, z, second)] + [weight.requires_grad_(not frozen)]
    memory = memory_of(chunk, 70, torch.float64)
    found = linear_cross_entropy(x, weight, targets, memory=memory, beside=(z, second), backend=backend, **OPTIONS[1])
    (found * SCALE).backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-13, atol=0)
    for leaf, expected in zip(leaves, (dx[:, :24], dx[:, 24:], dw[:, 24:], dw[:, :24]), strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-13)
        else:
            assert leaf.grad is None


def test_no_tokens() -> None:
    x, weight, targets = problem(0, 8, 10, torch.float32)
    loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets, backend="triton")
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert x.grad.shape == (0, 8)
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


def test_inputs_apart() -> None:
    x, weight, targets = problem(7, 24, 30, torch.float64)
    loss, dx, dw = exact(x, weight, targets, {})
    across, down = x.T.contiguous().requires_grad_(), weight.T.contiguous().requires_grad_()
    found = linear_cross_entropy(across.T, down.T, targets.repeat_interleave(2)[::2], backend="triton")
    (found * SCALE).backward()
    torch.testing.assert_close(found.detach(), loss)
    torch.testing.assert_close(across.grad, dx.T)
    torch.testing.assert_close(down.grad, dw.T)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-1, 70])
def test_target_outside_the_vocabulary(wrong: int, backend: Any) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    targets[3] = wrong
    memory = memory_of(4, 70, torch.float64)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, memory=memory, backend=backend)
    loss.backward()
    assert loss.isnan()
    assert x.grad is not None
    assert x.grad.isnan().all(1).tolist() == [row == 3 for row in range(11)]
    assert x.grad.isnan().any(1).sum() == 1


class Largest(TorchDispatchMode):
    """Counts elements of the largest tensor that operations return."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits() -> None:
    """Inside the operations too."""
    x, weight, targets = problem(64, 4, 50, torch.float32)
    operations = sys.modules["megalite_kernels.linear_cross_entropy"]
    options = (False, [True] * 4, False, 0, 50, 50, None, 0.0, 0.0, 0.0)
    terms, scales = [x, weight, x[:, :2], weight[:, :2]], torch.ones(64, device=DEVICE)
    with Largest() as largest:
        _, _, last, lses, *made = operations._op._init_fn(terms, targets, scales, "", 16, *options)
        scale = torch.ones((), device=DEVICE)
        operations._backward_op._init_fn(scale, terms, targets, scales, last, lses, made, *options)
    assert 16 * 50 <= largest.elements < 64 * 50


@pytest.mark.parametrize("chunk", [4, 11])
@pytest.mark.parametrize(
    ("backend", "told"), [("torch", "its backward has run"), ("triton", "modified by an inplace operation")]
)
def test_backward_runs_once(backend: Any, told: str, chunk: int) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    memory = memory_of(chunk, 70, torch.float64)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, memory=memory, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=told):
        loss.backward()


@pytest.mark.parametrize(("wide", "scaled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("chunk", [4, 11])
def test_custom_ops(chunk: int, wide: bool, scaled: bool) -> None:
    x, weight, targets = problem(11, 24, 70, torch.bfloat16 if wide else torch.float32)
    options = (True, [True] * 4, wide, 0, 70, 70, IGNORED, 0.1, 0.01, 3.0)
    terms = [x, weight, x[:, :2].contiguous(), weight[:, :2].contiguous()]
    scales = random(11 if scaled else 0, dtype=torch.float32, seed=4)
    operations = torch.ops.megalite
    forward, backward = operations.linear_cross_entropy.default, operations.linear_cross_entropy_backward.default
    _, _, last, lses, *made = forward(terms, targets, scales, "", chunk, *options)
    scale = torch.ones((), device=DEVICE)
    torch.library.opcheck(backward, (scale, terms, targets, scales, last, lses, made, *options))
    # Compiled, an operation may not return what backward overwrites; the function below does not.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = ([term.requires_grad_() for term in terms], targets, scales, "", chunk, *options)
    torch.library.opcheck(forward, inputs, test_utils=checks)


@pytest.mark.parametrize("chunk", [4, 11])
def test_compiled_as_one_graph(chunk: int) -> None:
    x, weight, targets = problem(11, 24, 70, torch.float64)
    loss, dx, dw = exact(x, weight, targets, {})
    memory = memory_of(chunk, 70, torch.float64)
    function = torch.compile(
        lambda x: linear_cross_entropy(x * 2, weight, targets, memory=memory, backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    half = (x / 2).requires_grad_()
    weight.requires_grad_()
    found = function(half)
    (found * SCALE).backward()
    torch.testing.assert_close(found.detach(), loss)
    torch.testing.assert_close(half.grad, 2 * dx)
    torch.testing.assert_close(weight.grad, dw)


@given(
    tokens=st.integers(0, 100_000),
    width=st.integers(1, 20_000),
    columns=st.integers(1, 200_000),
    ranks=st.integers(1, 8),
    memory=st.none() | st.integers(1, 2**34),
)
def test_chunks(tokens: int, width: int, columns: int, ranks: int, memory: int | None) -> None:
    chunk = chunk_tokens(tokens, width, columns, torch.bfloat16, ranks, memory)
    token = columns * 2
    bytes_of_chunk = chunk * token * min(ranks, 2)
    assert chunk >= 1
    if memory is not None:
        assert bytes_of_chunk <= max(memory, token * min(ranks, 2))
        return
    most = max(columns * width * 2, 4096 * token * min(ranks, 2))
    if chunk >= tokens:
        assert tokens * token <= most + columns * width * 4, "what chunks and the sum of dW would take"
    else:
        assert chunk >= 2048
        assert bytes_of_chunk <= most
        assert bytes_of_chunk + columns * width * 4 < tokens * token


@pytest.mark.parametrize(
    ("tokens", "width", "ranks", "chunk"),
    [(8192, 4096, 1, 8192), (16384, 4096, 1, 4096), (9000, 2048, 1, 3072), (100, 4096, 1, 100), (32768, 8192, 8, 4096)],
)
def test_chunks_of_llamas(tokens: int, width: int, ranks: int, chunk: int) -> None:
    assert chunk_tokens(tokens, width, 128256 // ranks, torch.bfloat16, ranks) == chunk


def test_one_chunk_moves_what_the_two_layers_do() -> None:
    tokens, width, columns = 100, 32, 1000
    forward, backward = bytes_moved(tokens, width, columns, tokens, torch.bfloat16)
    logits, weight, x = (2 * size for size in (tokens * columns, columns * width, tokens * width))
    assert forward == (x + weight + logits) + logits
    assert backward == 2 * logits + (2 * logits + 2 * x + 2 * weight)


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(function):
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def test_stats_are_gathered_while_the_next_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three chunks, which evaluation makes nothing but logits of."""
    operations = sys.modules["megalite_kernels.linear_cross_entropy"]
    events: list[str] = []

    class Gathering:
        def wait(self) -> None:
            events.append("wait")

    def gather(stats: Tensor, group: object, async_op: bool = False) -> tuple[Tensor, Gathering]:
        assert async_op
        events.append("gather")
        return stats[None], Gathering()

    monkeypatch.setattr(operations, "gather_stats", gather)
    x, weight, targets = problem(11, 24, 70, torch.float64)
    labels = labels_of(11, 70, targets, None, None, 0.0, 0.0, None, None)
    with Products(events):
        operations._forward(
            [operations.Factors(x, weight, False, False)], targets, x[:0, 0], object(), 4, False, labels
        )
    begun = ["product", "gather"]
    assert events == [*begun, *begun, "wait", *begun, "wait", "wait"]


def two_products() -> tuple[Tensor, Tensor, Tensor]:
    """A problem whose last 3 features are of a second product."""
    x, weight, targets = problem(11, 15, 48, torch.float64)
    targets[5] = IGNORED
    return x, weight, targets


def split(size: int, chunk: int, how: str, backend: Any) -> tuple[Tensor, Tensor, Tensor, int, int] | None:
    group = group_of(size)
    if group is None:
        return None
    every, weight, targets = two_products()
    columns, width = shards(size, 48, how)[group.rank()]
    part = torch.full((width, 15), 1e3, dtype=torch.float64, device=DEVICE)
    part[: len(columns)] = weight[columns.start : columns.stop]
    (x, z), (first, second) = (
        [tensor.contiguous().requires_grad_() for tensor in whole.split([12, 3], 1)] for whole in (every, part)
    )
    memory = memory_of(chunk, 48, torch.float64, size)
    counts = [collectives(group)]
    loss = linear_cross_entropy(
        x, first, targets, group, beside=(z, second),
        columns=columns, vocabulary=48, memory=memory, backend=backend, **OPTIONS[1],
    )  # fmt: skip
    counts.append(collectives(group))
    (loss * SCALE).backward()
    counts.append(collectives(group))
    dx, dw = (torch.cat([leaf.grad for leaf in pair], 1) for pair in ((x, z), (first, second)))
    assert dw[len(columns) :].eq(0).all()
    return loss.detach(), dx, dw[: len(columns)], counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [4, 11])
@pytest.mark.parametrize("how", ["even", "both"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_vocabulary(size: int, how: str, chunk: int, backend: str, ranks: Ranks) -> None:
    """One collective for each chunk; the parts of the gradient of x add up to it."""
    loss, dx, dw = exact(*two_products(), OPTIONS[1])
    found = ranks.run(split, size, chunk, how, backend)[: SIZE // size * size]
    for rank, (part_loss, _, part_dw, forward, backward) in enumerate(found):
        columns, _ = shards(size, 48, how)[rank % size]
        torch.testing.assert_close(part_loss, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(part_dw, dw[columns.start : columns.stop], rtol=0, atol=1e-12)
        assert (forward, backward) == (-(-11 // chunk), 0)
    for first in range(0, len(found), size):
        torch.testing.assert_close(sum(part[1] for part in found[first : first + size]), dx, rtol=0, atol=1e-12)
