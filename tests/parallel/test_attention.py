"""Attention block by block against attention with an explicit mask, on the CPU's kernels and as CUDA's are called."""

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from context_cases import mask, oracle
from torch import Tensor

from megalite.live_bytes import LiveBytes
from megalite.parallel import attention, context
from megalite.parallel.attention import Block, attend, attend_backward, empty_result
from megalite.parallel.context import Ring
from megalite.parallel.context import attention as attention_over
from megalite.parallel.sequence import Sequences, own_blocks

CPU = torch.device("cpu")
LENGTH, HEADS, KV_HEADS, WIDTH = 12, 6, 2, 8
DOCUMENTS = [(0, 3, 4, 12), (0, 12)]
EVERYTHING = slice(0, LENGTH)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def heads(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, len(DOCUMENTS), count, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
) -> tuple[Tensor, ...]:
    """What `aten::_flash_attention_forward` is documented to do on CUDA: dense `[b, n, h, e]` or packed `[n, h, e]`."""
    assert (dropout, debug) == (0.0, False)
    if offsets_q is None or offsets_k is None:
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        return *plain_attention(q, k, v, causal), Tensor(), Tensor(), Tensor()
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    found = []
    lengths = offsets_q.diff().tolist(), offsets_k.diff().tolist()
    assert (longest_q, longest_k) == (max(lengths[0]), max(lengths[1]))
    for parts in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True):
        found.append(plain_attention(*(part[None] for part in parts), causal))
    out = torch.cat([out[0] for out, _ in found])
    return out, torch.cat([lse[0] for _, lse in found], dim=1), Tensor(), Tensor(), Tensor()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bnhe,bmhe->bhnm", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~mask(q.shape[1], (0, q.shape[1])), -torch.inf)
    return torch.einsum("bhnm,bmhe->bnhe", scores.softmax(-1), v), scores.logsumexp(-1)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: object) -> Iterator:
    """Likewise `aten::_flash_attention_backward`; `out` and `lse` may be those of more keys than k has."""
    *ends, dropout, causal, _, _ = rest
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        block_out, block_lse, *_ = flash_forward(q, k, v, *ends, dropout, causal, False)
        # Of the final softmax this block's keys have the share exp(block_lse − lse); the other keys' share is fixed.
        by_head = (block_lse - lse).transpose(-1, -2)[..., None].exp()
        total = (grad * block_out * by_head).sum() - ((grad * out).sum(-1, keepdim=True) * by_head).sum()
    return iter(torch.autograd.grad(total, (q, k, v)))


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's kernels, or the code that calls CUDA's with stand-ins for those."""
    if request.param == "cuda":
        monkeypatch.setattr(attention, "_forward_cpu", attention._forward_cuda)
        monkeypatch.setattr(attention, "_backward_cpu", attention._backward_cuda)
        stand_ins = {"_flash_attention_forward": flash_forward, "_flash_attention_backward": flash_backward}
        monkeypatch.setattr(attention, "ops", SimpleNamespace(**stand_ins))
    return request.param


def offsets(documents: tuple[int, ...], kernels: str) -> Tensor | None:
    return torch.tensor(documents, dtype=torch.int32) if kernels == "cuda" and len(documents) > 2 else None


def blocks(kernels: str) -> list[Block]:
    """Of two samples, the second a single document, causal attention in blocks that reach over one another."""
    first, second = slice(0, 1), slice(1, 2)
    late, early = slice(7, LENGTH), slice(0, 7)
    return [
        Block(first, EVERYTHING, EVERYTHING, DOCUMENTS[0], offsets(DOCUMENTS[0], kernels)),
        Block(second, early, early, (0, 7)),
        Block(second, late, slice(0, 4)),
        Block(second, late, late, (0, 5)),
        Block(second, late, slice(4, 7)),
    ]


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("cuda", torch.float64), *(("cpu", dtype) for dtype in TOLERANCES)], indirect=["kernels"]
)
def test_blocks_add_up_to_attention_with_a_mask(kernels: str, dtype: torch.dtype) -> None:
    q, k, v = (heads(count, seed) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = oracle(*leaves, DOCUMENTS)
    grad = heads(HEADS, 3)
    expected.backward(grad)
    y, dq, dkv = in_blocks(*(x.to(dtype) for x in (q, k, v, grad)), blocks(kernels))
    assert dq.dtype == dkv.dtype == torch.promote_types(dtype, torch.float32)
    for found, leaf in zip((y, dq, *dkv.unbind(1)), (expected, *(leaf.grad for leaf in leaves)), strict=True):
        assert (found.double() - leaf).abs().max() < TOLERANCES[dtype]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of q and of k and v."""
    kv = torch.stack((k, v), dim=1)
    out, lse = empty_result(q)
    attend(out, lse, q, kv, blocks)
    out = out.to(q.dtype)
    dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
    attend_backward(dq, dkv, grad, q, kv, out, lse, blocks)
    return out, dq, dkv


def test_gradients_by_differences() -> None:
    ring = Ring([own_blocks((range(LENGTH),), [Sequences(slice(0, 1), DOCUMENTS[0])], CPU)], None)
    q, k, v = (heads(count, seed)[:, :1, :, :2].requires_grad_() for seed, count in enumerate((2, 1, 1)))
    assert torch.autograd.gradcheck(ring, (q, k, v))


def test_nothing_is_as_large_as_a_mask() -> None:
    length = 4096
    ring = attention_over("ring", None, length, CPU, [(0, 1000, 1001, length)])
    q, k, v = (torch.randn(length, 1, 1, 4, requires_grad=True) for _ in range(3))
    with LiveBytes() as live:
        ring(q, k, v).sum().backward()
    assert sum(live.peak().values()) < length * length  # bytes of a mask of booleans; scores would take 4 times as many


@pytest.mark.parametrize("documents", [(), (0, 4, LENGTH)])
def test_cuda_kernels_have_the_signature_and_results_that_are_relied_on(documents: tuple[int, ...]) -> None:
    """On the meta device, which checks arguments against the operators' schemas and knows the shapes of results."""
    q, k, v = (heads(count, 0)[:, :1].to("meta") for count in (HEADS, KV_HEADS, KV_HEADS))
    ends = torch.tensor(documents, dtype=torch.int32, device="meta") if documents else None
    block = Block(slice(0, 1), EVERYTHING, EVERYTHING, documents, ends)
    out, lse = attention._forward_cuda(q, k, v, block)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, HEADS, LENGTH), torch.float32)
    grads = attention._backward_cuda(out, out, lse, q, k, v, block)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_the_schemas_name_arguments_in_the_order_of_the_calls() -> None:
    names = {
        "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "return_debug_mask",
        "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal rng_state unused",
    }
    for name, arguments in names.items():
        schema = getattr(torch.ops.aten, name).default._schema
        required = [argument.name for argument in schema.arguments if not argument.has_default_value()]
        assert required == arguments.split()


def test_a_batch_of_equal_samples_is_one_call_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(*args: object, **options: object) -> object:
        calls.append(args)
        return kernel(*args, **options)

    monkeypatch.setattr(attention, "ops", SimpleNamespace(_scaled_dot_product_flash_attention_for_cpu=counted))
    q, k, v = (heads(count, 0) for count in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = empty_result(q)
    attend(
        out, lse, q, torch.stack((k, v), 1), own_blocks((range(LENGTH),), [Sequences(slice(None), (0, LENGTH))], CPU)
    )
    assert len(calls) == 1


def test_keys_and_values_repeated_for_every_query_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [heads(count, seed).requires_grad_() for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    grad, found = heads(HEADS, 3), []
    for repeated in (False, True):
        monkeypatch.setattr(context, "_needs_equal_heads", lambda *_, repeated=repeated: repeated)
        out = context.causal(*given)
        found.append([out, *torch.autograd.grad(out, given, grad)])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-12, atol=1e-13)
