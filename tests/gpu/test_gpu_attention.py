"""Attention in blocks on a CUDA device: every rank's part of ring and all-gather, and documents; `make gpu` runs it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from attention_parts import FULL, in_blocks, oracle
from torch import Tensor

from megalite.config.attention_kernels import Kernel
from megalite.config.layers import Scores
from megalite.parallel.context import attention
from megalite.parallel.sequence import Documents, Method

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTH, BATCH, HEADS, KV_HEADS, HEAD = 256, 2, 4, 2, 64
WHOLE: list[Documents] = [(0, LENGTH), (0, LENGTH)]
CUT: list[Documents] = [(0, 3, 100, 200, LENGTH), (0, 128, LENGTH)]
CUDA = torch.device("cuda")


def random(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, BATCH, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def reference(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Sequence[Documents], kind: Scores = FULL
) -> list[Tensor]:
    """The result and its gradients, in float64 under an explicit mask."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    y = oracle(*inputs, documents, kind)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.double())]


TOLERANCE = 2**-6  # relative, of bf16


def apart(expected: Sequence[Tensor], found: Sequence[Tensor]) -> dict[str, float]:
    """The relative distances that are above the tolerance; where a gradient is exactly zero, relative to that of v."""
    names = ("y", "dq", "dk", "dv")
    far = {
        name: ((blocked.double() - exact).norm() / (exact.norm() or expected[-1].norm())).item()
        for name, exact, blocked in zip(names, expected, found, strict=True)
    }
    return {name: distance for name, distance in far.items() if not distance < TOLERANCE}


@pytest.mark.parametrize("documents", [WHOLE, CUT], ids=["whole", "documents"])
@pytest.mark.parametrize(("method", "cp"), [("ring", 1), ("ring", 2), ("ring", 4), ("all_gather", 4)])
def test_blocks_give_what_whole_attention_does(method: Method, cp: int, documents: list[Documents]) -> None:
    assert all(first < last for cuts in documents for first, last in pairwise(cuts))
    inputs = random(CUDA, torch.bfloat16)
    assert apart(reference(*inputs, documents), in_blocks(method, cp, *inputs, documents)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "kind",
    [
        Scores(1),
        Scores(50),
        Scores(70, 2.0),
        Scores(None, 2.0, 0.3),
        Scores(50, None, 0.3),
    ],
)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_windows_and_capped_scores_are_those_of_the_formula(cp: int, kind: Scores, dtype: torch.dtype) -> None:
    inputs = random(CUDA, dtype)
    for documents in (WHOLE, CUT):
        assert apart(reference(*inputs, documents, kind), in_blocks("ring", cp, *inputs, documents, kind)) == {}


@pytest.mark.parametrize("documents", [None, CUT], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", [Scores(50), Scores(70, 2.0, 0.3), Scores(None, 2.0), Scores(scale=0.3)])
def test_whole_sequences_have_kernels_of_their_own(kind: Scores, documents: list[Documents] | None) -> None:
    """FlashAttention's windows, and for capped scores what FlexAttention generates, in a compiled function too."""
    *leaves, grad = random(CUDA, torch.bfloat16)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    attend = attention("ring", None, LENGTH, CUDA, documents, kind)
    for function in (attend, torch.compile(lambda *given: attend(*given) * 1)):
        y = function(*leaves)
        found = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
        expected = reference(*(x.detach() for x in leaves), grad, documents or WHOLE, kind)
        assert apart(expected, found) == {}


@pytest.mark.parametrize("documents", [None, CUT], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kernel", [None, "flash", "flex", "math"])
def test_sinks_are_one_more_column_of_scores(
    kernel: Kernel | None, window: int | None, documents: list[Documents] | None
) -> None:
    kind = Scores(window, sinks=True)
    *leaves, grad = random(CUDA, torch.bfloat16)
    leaves.append(torch.linspace(-2, 2, HEADS, device=CUDA, dtype=torch.bfloat16))
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    exact = oracle(*wide[:3], documents or WHOLE, kind, wide[3])
    expected = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = attention("ring", None, LENGTH, CUDA, documents, kind, kernel)(*leaves)
    for found, correct in zip((y.detach(), *torch.autograd.grad(y, leaves, grad)), expected, strict=True):
        assert (found.double() - correct).norm() < TOLERANCE * correct.norm()
