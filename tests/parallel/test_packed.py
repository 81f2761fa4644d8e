"""FlashAttention over packed documents: results with stand-ins for CUDA's kernels, bytes around them, and compiling."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_parts import oracle
from flash_stand_ins import STAND_INS
from torch import Tensor

from megalite.config.layers import Scores, layer_kinds
from megalite.config.model_schema import Model
from megalite.config.schema import Batch, Config, Run
from megalite.parallel import packed
from megalite.parallel.context import Ring
from megalite.parallel.packed import Packed
from megalite.parallel.sequence import Documents, Sequences, joined, own_blocks
from megalite.plan.parts.attention_memory import AttentionMemory
from megalite.plan.parts.sizes import Sizes
from megalite_tools.bench.moved_bytes import MovedBytes

CPU, META = torch.device("cpu"), torch.device("meta")
LENGTH, HEADS, KV_HEADS, WIDTH = 12, 6, 2, 8
CUT: list[Documents] = [(0, 3, 4, 12), (0, 12)]
ALIKE: list[Documents] = [(0, 5, 12)] * 2


def heads(length: int, samples: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, samples, count, WIDTH, dtype=torch.float64, generator=generator)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ops", STAND_INS)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("documents", [None, CUT, ALIKE], ids=["whole", "documents", "equal documents"])
@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize(("scale", "sinks"), [(None, False), (0.3, False), (None, True)])
def test_results_and_gradients_are_those_of_the_mask(
    documents: list[Documents] | None, window: int | None, scale: float | None, sinks: bool
) -> None:
    given = [heads(LENGTH, 2, count, seed).requires_grad_() for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    grad = heads(LENGTH, 2, HEADS, 3)
    if sinks:
        given.append(torch.linspace(-3, 3, HEADS, dtype=torch.float64).requires_grad_())
    exact = oracle(*given[:3], documents, Scores(window, None, scale), *given[3:])
    found = Packed(documents, window, CPU, scale)(*given)
    results = (found, *torch.autograd.grad(found, given, grad)), (exact, *torch.autograd.grad(exact, given, grad))
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) < 1e-14


@pytest.mark.usefixtures("stand_ins")
def test_strided_views_are_as_good_as_copies() -> None:
    """As slices of one product, or of what an all-to-all brought."""
    together = heads(LENGTH, 2, HEADS + 2 * KV_HEADS)
    views = together.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    for documents in (None, CUT, ALIKE):
        attend = Packed(documents, 4, CPU)
        assert torch.equal(attend(*views), attend(*(view.contiguous() for view in views)))


class Compiled:
    """A backend that counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.usefixtures("stand_ins")
def test_a_compiled_layer_is_one_graph_whatever_the_documents() -> None:
    def layer(attend: Packed, x: Tensor) -> Tensor:
        q, k, v = (x * 2).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        return attend(q, k, v) * 3

    compiled = Compiled()
    run = torch.compile(layer, backend=compiled, fullgraph=True, dynamic=False)  # as `train.build` does
    x = heads(LENGTH, 1, HEADS + 2 * KV_HEADS).requires_grad_()
    for bounds in ((0, 12), (0, 5, 12), (0, 1, 2, 7, 12), (0, 3, 4, 5, 6, 12), (0, 9, 12)):
        attend = Packed([bounds], None, CPU)
        found, exact = run(attend, x), layer(attend, x)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, exact)]
        assert torch.equal(found, exact)
        assert torch.equal(*gradients)
    assert compiled.graphs == 1


def plumbing(attend: Any, length: int, samples: int) -> float:
    """Bytes per token, forward and backward, around the kernels of one layer of Llama 3 8B in bf16."""
    counts = 32, 8, 8
    if samples == 1:  # as one product makes them
        together = torch.empty(length, 1, sum(counts), 128, dtype=torch.bfloat16, device=META, requires_grad=True)
        q, k, v = together.split(counts, 2)
    else:
        q, k, v = (
            torch.empty(length, samples, count, 128, dtype=torch.bfloat16, device=META, requires_grad=True)
            for count in counts
        )
    with MovedBytes(lambda name, tensor: "flash_attention" not in name and tensor.is_meta) as moved:
        attend(q, k, v)
    return moved.bytes.total() / (length * samples)


def in_one_call(documents: Sequence[Documents] | None, window: int | None) -> Any:
    attend = Packed(documents, window, CPU)
    offsets = None if attend.offsets is None else attend.offsets.to(META)

    def run(q: Tensor, k: Tensor, v: Tensor) -> None:
        how = offsets, attend.ends, attend.left, attend.scale
        out, lse = packed.packed_attention._init_fn(q, k, v, None, *how)
        packed.packed_attention_backward._init_fn(out, q, k, v, None, out, lse, *how)

    return run


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("documents", [True, False])
def test_what_is_kept_is_what_is_predicted(documents: bool) -> None:
    """Queries, keys, values and the output, with no copy of keys and values beside each other as rings have it."""
    model = Model(width=HEADS * WIDTH, heads=HEADS, kv_heads=KV_HEADS, sequence_length=LENGTH)
    model.attention.window = None if documents else 4
    config = Config(model=model, batch=Batch(micro=2, global_=2), run=Run(device="cuda"))
    config.data.mask_documents, config.parallel.dp_shard = documents, 1
    (kind,) = set(layer_kinds(model))
    predicted = AttentionMemory(Sizes(config), kind.attention.heads, normed=False)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            kept[x.data_ptr()] = x.nbytes * predicted.sizes.w // x.element_size()
        return x

    given = [heads(LENGTH, 2, count, seed).requires_grad_() for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = Packed(CUT if documents else None, None if documents else 4, CPU)(*given)
    sums = y[..., 0].numel() * predicted.sizes.w
    assert sum(kept.values()) - sums == sum(part.bytes for part in predicted.kept())


LONG: list[Documents] = [(0, 1000, 1001, 4096)]
OTHER: list[Documents] = [(0, 50, 4096)]
JOINED = [joined(LONG + OTHER)]  # samples as a step runs them


@pytest.mark.parametrize(
    ("documents", "window", "samples"),
    [(LONG, None, 1), (LONG, 512, 1), (LONG * 2, 512, 2), (None, 512, 4), (JOINED, None, 1), (JOINED, 512, 1)],
)
def test_nearly_nothing_is_copied_around_the_kernel(
    documents: list[Documents] | None, window: int | None, samples: int
) -> None:
    """10 KB would be allowed; merging blocks, as rings must, takes 264."""
    length = 4096 if documents is None else documents[0][-1]
    assert plumbing(in_one_call(documents, window), length, samples) < 100


def test_samples_beside_each_other_with_documents_of_their_own_have_their_results_copied_once() -> None:
    """As Ulysses has them. Copied are q of the output, and q + k + v of the gradients: read and written."""
    once = 2 * (2 * 32 + 2 * 8) * 128 * 2
    assert once <= plumbing(in_one_call(LONG + OTHER, None), 4096, 2) < once + 1000


def test_a_ring_does_what_one_call_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the count is known to see it."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    blocks = own_blocks((range(4096),), [Sequences(slice(0, 1), LONG[0])], CPU)

    def run(q: Tensor, k: Tensor, v: Tensor) -> None:
        y = Ring([blocks], None)(q, k, v)
        y.backward(torch.empty_like(y))

    assert plumbing(run, 4096, 1) > 100_000
