"""Attention block by block against attention with an explicit mask, on the CPU's kernels and as CUDA's are called."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_parts import in_blocks as over_ranks
from attention_parts import mask, oracle
from flash_stand_ins import STAND_INS
from torch import Tensor

from megalite.config.layers import Scores
from megalite.dry_run.live_bytes import LiveBytes
from megalite.parallel import attention, context, explicit, flex
from megalite.parallel.attention import BlockKernels, attend, attend_backward, empty_result
from megalite.parallel.blocks import Block
from megalite.parallel.context import Ring
from megalite.parallel.context import attention as attention_over
from megalite.parallel.sequence import Sequences, own_blocks
from megalite.plan.parts.window import attended_pairs

CPU = torch.device("cpu")
LENGTH, HEADS, KV_HEADS, WIDTH = 12, 6, 2, 8
DOCUMENTS = [(0, 3, 4, 12), (0, 12)]
EVERYTHING = slice(0, LENGTH)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def heads(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, len(DOCUMENTS), count, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's kernels, plain PyTorch, or the code that calls CUDA's kernels with stand-ins for those."""
    if request.param == "explicit":
        plain = [partial(function, softcap=None) for function in (explicit.forward, explicit.backward)]
        monkeypatch.setattr(attention, "_kernels", lambda _, kind, math: scaled(*plain, lambda block: [block], kind))
    if request.param == "cuda":
        of_cuda = attention._forward_cuda, attention._backward_cuda, lambda block: [with_offsets(block)]
        monkeypatch.setattr(attention, "_kernels", lambda _, kind, math: attention._padding(*scaled(*of_cuda, kind)))
        monkeypatch.setattr(attention, "ops", STAND_INS)
    return request.param


def scaled(forward: Any, backward: Any, parts: Any, kind: Scores) -> BlockKernels:
    return BlockKernels(partial(forward, scale=kind.scale), partial(backward, scale=kind.scale), parts)


def with_offsets(block: Block) -> Block:
    """As it is made for CUDA."""
    several = len(block.documents) > 2
    return replace(block, offsets=torch.tensor(block.documents, dtype=torch.int32) if several else None)


def blocks() -> list[Block]:
    """Of two samples, the second a single document, causal attention in blocks that reach over one another."""
    first, second = slice(0, 1), slice(1, 2)
    late, early = slice(7, LENGTH), slice(0, 7)
    return [
        Block(first, EVERYTHING, EVERYTHING, DOCUMENTS[0]),
        Block(second, early, early, (0, 7)),
        Block(second, late, slice(0, 4)),
        Block(second, late, late, (0, 5)),
        Block(second, late, slice(4, 7)),
    ]


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("cuda", torch.float64), *((kernels, dtype) for kernels in ("cpu", "explicit") for dtype in TOLERANCES)],
    indirect=["kernels"],
)
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("values", [WIDTH, 5])
def test_blocks_add_up_to_attention_with_a_mask(
    kernels: str, dtype: torch.dtype, scale: float | None, values: int
) -> None:
    q, k, v = (heads(count, seed) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    v = v[..., :values]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    kind = Scores(scale=scale)
    expected = oracle(*leaves, DOCUMENTS, kind)
    grad = heads(HEADS, 3)[..., :values]
    expected.backward(grad)
    y, dq, dkv = in_blocks(*(x.to(dtype) for x in (q, k, v, grad)), blocks(), kind)
    assert dq.dtype == dkv.dtype == torch.promote_types(dtype, torch.float32)
    for found, leaf in zip(
        (y, dq, *dkv.split((k.shape[-1], v.shape[-1]), dim=-1)),
        (expected, *(leaf.grad for leaf in leaves)),
        strict=True,
    ):
        assert (found.double() - leaf).abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("kernels", ["cpu", "explicit", "cuda"], indirect=True)
@pytest.mark.parametrize("cp", [1, 2])
def test_windows_are_those_of_the_mask(kernels: str, cp: int) -> None:
    """With documents of several samples, on the rows of one rank and of two, whose chunks have 3 positions."""
    for window in (1, 2, 3, 4, 7, 11, 12):
        for documents in (DOCUMENTS, [(0, LENGTH)] * 2):
            assert from_oracle(cp, documents, Scores(window)) < 1e-13


@pytest.mark.parametrize("cp", [1, 2])
def test_capped_scores_are_those_of_the_formula(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "ROWS", 2)  # so that a block takes several steps
    for kind in (Scores(None, 0.7), Scores(4, 0.7), Scores(1, 50.0), Scores(4, 0.7, 0.9)):
        for documents in (DOCUMENTS, [(0, LENGTH)] * 2):
            assert from_oracle(cp, documents, kind) < 1e-13


def from_oracle(cp: int, documents: list[tuple[int, ...]], kind: Scores) -> float:
    """The largest difference of the result and its gradients from those under an explicit mask."""
    *given, grad = (heads(count, seed) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)))
    sinks = [torch.linspace(-3, 3, HEADS, dtype=torch.float64)] if kind.sinks else []
    leaves = [x.clone().requires_grad_() for x in (*given, *sinks)]
    expected = oracle(*leaves[:3], documents, kind, *leaves[3:])
    expected.backward(grad)
    found = over_ranks("ring", cp, *given, grad, documents, kind, *sinks)
    exact = (expected, *(leaf.grad for leaf in leaves))
    return torch.stack([(x - y).detach().abs().max() for x, y in zip(found, exact, strict=True)]).max().item()


@pytest.mark.parametrize("kernels", ["cpu", "explicit", "cuda"], indirect=True)
@pytest.mark.parametrize("cp", [1, 2])
def test_sinks_are_one_more_column_of_scores(kernels: str, cp: int) -> None:
    for window in (None, 1, 4):
        for documents in (DOCUMENTS, [(0, LENGTH)] * 2):
            assert from_oracle(cp, documents, Scores(window, sinks=True)) < 1e-13


@pytest.mark.parametrize("kind", [Scores(sinks=True), Scores(4, sinks=True), Scores(None, 0.7, sinks=True)], ids=str)
def test_gradients_of_sinks_by_differences(kind: Scores) -> None:
    """Sinks far above all scores and far below, too: of these, attention has no trace."""
    q, k, v = (heads(count, seed)[..., :2].requires_grad_() for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    sinks = torch.tensor([-1000.0, -1.0, 0.0, 1.0, 2.0, 1000.0], dtype=torch.float64, requires_grad=True)
    attend = attention_over("ring", None, LENGTH, CPU, None, kind)
    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))
    y = attend(q, k, v, sinks)
    without = attention_over("ring", None, LENGTH, CPU, None, replace(kind, sinks=False))(q, k, v)
    torch.testing.assert_close(y[:, :, 0], without[:, :, 0], rtol=1e-13, atol=1e-13)
    assert not y[:, :, 5].any()


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, blocks: list[Block], kind: Scores = attention.FULL_SCORES
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of q and of k and v."""
    kv = torch.cat((k, v), dim=-1)
    out, lse = empty_result(q, kv)
    attend(out, lse, q, kv, blocks, kind)
    out = out.to(q.dtype)
    dq, dkv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
    attend_backward(dq, dkv, grad, q, kv, out, lse, blocks, kind)
    return out, dq, dkv


def test_gradients_by_differences() -> None:
    ring = Ring([own_blocks((range(LENGTH),), [Sequences(slice(0, 1), DOCUMENTS[0])], CPU)], None)
    q, k, v = (heads(count, seed)[:, :1, :, :2].requires_grad_() for seed, count in enumerate((2, 1, 1)))
    assert torch.autograd.gradcheck(ring, (q, k, v))


def test_nothing_is_as_large_as_a_mask() -> None:
    length = 4096
    q, k, v = (torch.randn(length, 1, 1, 4, requires_grad=True) for _ in range(3))
    for kind in (Scores(), Scores(100), Scores(100, 30.0), Scores(None, 30.0)):
        attend = attention_over("ring", None, length, CPU, [(0, 1000, 1001, length)], kind)
        with LiveBytes() as live:
            attend(q, k, v).sum().backward()
        # Bytes of a mask of booleans; scores would take 4 times as many.
        assert sum(live.peak().values()) < length * length


def work(kind: Scores, length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many products of a query and a key forward takes, triangles being half of a rectangle."""
    kernel, found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []

    def counted(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, Tensor]:
        n, m = q.shape[2], k.shape[2]
        found.append(n * (n + 1) // 2 if is_causal else n * m)
        return kernel(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(attention, "ops", SimpleNamespace(_scaled_dot_product_flash_attention_for_cpu=counted))
    attention_over("ring", None, length, CPU, [(0, length)], kind)(*(torch.randn(length, 1, 1, 4) for _ in range(3)))
    return sum(found)


@pytest.mark.parametrize("window", [1, 2, 17, 99, 100, 150, 199, 200, None])
def test_keys_outside_of_the_window_cost_nothing(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(Scores(window), 200, monkeypatch) == attended_pairs(200, window)


def test_with_capped_scores_keys_outside_of_the_window_cost_little() -> None:
    q = heads(1, 0)[:1, :1].expand(4000, 1, 1, WIDTH)
    (block,) = own_blocks((range(4000),), [Sequences(slice(None), (0, 4000))], CPU, 100)
    steps = [(keys.stop - keys.start) * (rows.stop - rows.start) for rows, keys, _ in explicit._steps(block, q, q)]
    assert sum(steps) < 4000 * (100 + explicit.ROWS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [None, [(0, 300), (0, 3, 4, 150, 300)]])
@pytest.mark.parametrize("window", [None, 5, 130])
def test_flex_attention_is_told_what_to_attend_to(documents: list[tuple[int, ...]] | None, window: int | None) -> None:
    """On the CPU, where it has no backward and goes by the mask alone; tiles are compared with the mask."""
    length, kind = 300, Scores(window, 0.7, 0.4)
    q, k, v = (torch.randn(length, 2, count, 16, dtype=torch.float64) for count in (HEADS, KV_HEADS, KV_HEADS))
    attend = flex.Flex(documents or [(0, length)], window, 0.7, CPU, 0.4)
    torch.testing.assert_close(attend(q, k, v), oracle(q, k, v, documents, kind), rtol=1e-12, atol=1e-12)
    sinks = torch.linspace(-3, 3, HEADS, dtype=torch.float64)
    expected = oracle(q, k, v, documents, kind, sinks)
    torch.testing.assert_close(attend(q, k, v, sinks), expected, rtol=1e-12, atol=1e-12)
    for sample, bounds in enumerate(documents or [(0, length)]):
        tiles = [part.split(128, dim=1) for part in mask(length, bounds, window).split(128)]
        some = torch.tensor([[bool(tile.any()) for tile in row] for row in tiles])
        every = torch.tensor([[bool(tile.all()) for tile in row] for row in tiles])
        assert torch.equal(attend.mask.to_dense()[sample, 0].bool(), some)
        full = [
            set(order[:count].tolist())
            for order, count in zip(
                attend.mask.full_kv_indices[sample, 0], attend.mask.full_kv_num_blocks[sample, 0], strict=True
            )
        ]
        assert full == [set(row.nonzero()[:, 0].tolist()) for row in every]


def test_windows_and_capped_scores_are_those_of_transformers() -> None:
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    masks = pytest.importorskip("transformers.masking_utils")
    q, k, v = (heads(count, seed, torch.float32) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    sees = masks.sliding_window_causal_mask_function(5)
    at = torch.arange(LENGTH)
    hidden = ~sees(0, 0, at[:, None], at)
    module = SimpleNamespace(head_dim=WIDTH, num_key_value_groups=HEADS // KV_HEADS, training=False)
    bias = torch.zeros(LENGTH, LENGTH).masked_fill(hidden, -torch.inf)[None, None]
    by_sample = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    expected, _ = gemma.eager_attention_forward(module, *by_sample, bias, scaling=WIDTH**-0.5, softcap=0.7)
    found = attention_over("ring", None, LENGTH, CPU, None, Scores(5, 0.7))(q, k, v)
    torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left", [None, 3])
@pytest.mark.parametrize("documents", [(), (0, 4, LENGTH)])
def test_cuda_kernels_have_the_signature_and_results_that_are_relied_on(
    documents: tuple[int, ...], left: int | None
) -> None:
    """On the meta device, which checks arguments against the operators' schemas and knows the shapes of results."""
    q, k, v = (heads(count, 0)[:, :1].to("meta") for count in (HEADS, KV_HEADS, KV_HEADS))
    ends = torch.tensor(documents, dtype=torch.int32, device="meta") if documents else None
    block = Block(slice(0, 1), EVERYTHING, EVERYTHING, documents, ends, left)
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
    kv = torch.cat((k, v), dim=-1)
    out, lse = empty_result(q, kv)
    attend(out, lse, q, kv, own_blocks((range(LENGTH),), [Sequences(slice(None), (0, LENGTH))], CPU))
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
