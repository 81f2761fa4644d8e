"""The branches for CUDA, run without a GPU: where tensors are, which operations are called, and who waits for whom."""

import mmap
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_cuda_cases as cases
import pytest
import torch
from fake_cuda import fake_cuda

from megalite.config.layers import Scores
from megalite.config.model_schema import Adapter, Attention, Latent, Model
from megalite.config.parallel_schema import (
    Context,
    DataParallel,
    Overlap,
    Parallel,
    Pipeline,
    Placement,
    TensorParallel,
)
from megalite.config.schema import Batch, Checkpoint, Config, Data, Kernels, Log, Optim, Run, Train

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None or torch.version.cuda is not None,
    reason="compiles a library with g++ on Linux, for PyTorch's build without CUDA",
)

Call = Callable[..., Any]
PLAIN = Config(
    run=Run(device="cuda"),
    model=Model(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab_size=128, sequence_length=64),
    parallel=Parallel(dp_shard=1),
    batch=Batch(micro=2, global_=4),
    train=Train(steps=3, precision="bf16"),
)


ON_HOST = replace(PLAIN, parallel=replace(PLAIN.parallel, placement=Placement("host")))


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    with fake_cuda(tmp_path_factory.mktemp("fake_cuda")) as call:
        yield call


def spread(**parallel: Any) -> Config:
    layout = Parallel(**{"dp_shard": 1, **parallel})
    return replace(PLAIN, parallel=layout, batch=Batch(micro=2, global_=4 * layout.layout.dp))


def test_a_rank_takes_its_gpu_and_leaves_it_to_the_watchdog_to_end_a_job(call: Call) -> None:
    device, current, nccl = call(cases.started, 1, {})
    assert (device, current) == ("cuda:1", [1])
    assert set(nccl.values()) == {"0"}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_GRAPH_REGISTER"])
def test_what_the_environment_says_of_nccl_stays(name: str, call: Call) -> None:
    *_, nccl = call(cases.started, 0, {name: "3"})
    assert nccl.pop(name) == "3"
    assert set(nccl.values()) == {"0"}


LAYOUTS = {
    "pp": {"pp": 2},
    "pp, groups of neighbours": {"pp": 4, "pipeline": Pipeline(split=[0, 1, 1, 0])},
    "pp, a stage at either end": {"pp": 2, "pipeline": Pipeline("zbv", split=[0, 1, 1, 0])},
    "tp, dp_shard": {"tp": 2, "dp_shard": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ddp": {"dp_shard": 2, "data": DataParallel(mode="ddp")},
    "ring": {"cp": 2, "context": Context("ring")},
    "all_gather": {"cp": 2, "context": Context("all_gather")},
    "ulysses": {"cp": 2, "context": Context("ulysses")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_a_step_talks_over_is_connected_before_it(layout: str, call: Call) -> None:
    building, stepping = call(cases.connected, spread(**LAYOUTS[layout]))
    assert stepping["collectives"] or stepping["transfers"]
    for kind, groups in stepping.items():
        assert groups <= building[kind]


def test_copies_of_a_tied_embedding_meet_over_what_is_connected(call: Call) -> None:
    tied = replace(spread(pp=2), model=replace(PLAIN.model, tie_embeddings=True))
    building, stepping = call(cases.connected, tied)
    assert stepping["transfers"] == {(0, 1)} <= building["transfers"]


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}], ids=str
)
def test_no_two_groups_have_the_same_ranks(layout: dict[str, int], call: Call) -> None:
    made = call(cases.groups, spread(**layout))
    assert len(made) == len(set(made)) > 0


def test_groups_of_a_mesh_have_the_timeout_of_the_job(call: Call) -> None:
    assert call(cases.timeouts, spread(pp=2, tp=2, cp=2)) == {timedelta(seconds=77)}


@pytest.mark.parametrize("overlap", ["symmetric", "auto"])
def test_products_are_fused_with_collectives_where_gpus_share_memory(overlap: Overlap, call: Call) -> None:
    """Of two layers and two micro-batches: gathers of inputs and of gradients, scatters of outputs."""
    found, reason = call(cases.fused, spread(tp=2, tensor=TensorParallel(overlap)), "")
    assert found == {"symm_mem::fused_all_gather_matmul": 16, "symm_mem::fused_matmul_reduce_scatter": 8}
    assert reason == ""


def test_gpus_without_symmetric_memory_are_told_of_or_send_in_pieces(call: Call) -> None:
    config = spread(tp=2, tensor=TensorParallel("auto"))
    found, reason = call(cases.fused, config, None)
    assert not found
    assert reason == f"PyTorch {torch.__version__} has no symmetric memory for cuda"
    told = 'parallel.tensor.overlap = "symmetric": cannot be used here: PyTorch .*; use pieces, or auto'
    with pytest.raises(RuntimeError, match=told):
        call(cases.fused, spread(tp=2, tensor=TensorParallel("symmetric")), None)


def test_the_compiler_is_told_to_fuse_products_with_collectives(call: Call) -> None:
    compiled = replace(PLAIN.train, compile=True)
    pieces, symmetric = (
        call(cases.compiler_settings, replace(spread(tp=2, tensor=TensorParallel(overlap)), train=compiled))
        for overlap in ("pieces", "symmetric")
    )
    assert pieces == [{"dynamic": False}] * 2
    assert symmetric == [{"dynamic": False, "options": {"_micro_pipeline_tp": True}}] * 2


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_in_blocks_takes_what_flash_attention_does(method: Any, documents: bool, call: Call) -> None:
    config = replace(
        spread(cp=2, context=Context(method)), data=Data(mask_documents=documents, end_of_document=cases.END)
    )
    calls = call(cases.attended, config)
    assert bool(calls) == (documents or method != "ulysses")
    heads, width = (2 if method == "ulysses" else 4), 16
    for name, shape, ends, causal in calls:
        assert shape[-2:] == [heads, width], name
        packed = name.startswith("packed")
        assert packed == (method == "ulysses")
        assert len(shape) == (4 if packed or ends is None else 3), name
        assert ends is None or causal
    found = {name: sum(called == name for called, *_ in calls) for name, *_ in calls}
    assert len(set(found.values())) <= 1, "every block has a backward"


@pytest.mark.parametrize(("kernel", "documents"), [("flash", False), ("flash", True), ("efficient", False)])
def test_values_narrower_than_keys_are_padded_for_flash_attention_alone(
    kernel: Any, documents: bool, call: Call
) -> None:
    latent = Attention(latent=Latent(32, 24, 16))
    model = replace(PLAIN.model, kv_heads=4, head_width=24, rotary_width=8, attention=latent)
    config = replace(
        PLAIN,
        model=model,
        kernels=Kernels(attention=kernel),
        data=Data(mask_documents=documents, end_of_document=cases.END),
    )
    flash = {(f"_flash_attention_{name}", (24, 24, 24)) for name in ("forward", "backward")}
    sdpa = {("scaled_dot_product_attention", (24, 24, 16))}
    assert call(cases.widths_attended, config) == (flash if kernel == "flash" else sdpa)


@pytest.mark.parametrize(
    ("documents", "joint", "groups"),
    [
        (None, False, None),
        ([(0, 64), (0, 20, 64)], False, [[2, 64], [3, 44]]),
        ([(0, 64), (0, 20, 64)], True, [[4, 64]]),
        ([(0, 20, 64)] * 2, False, [[3, 44]]),
    ],
)
def test_a_window_is_one_call_of_flash_attention(documents: Any, joint: bool, groups: Any, call: Call) -> None:
    forward = ("packed_attention", [128, 1, 4, 16] if joint else [64, 2, 4, 16], groups, 9)
    assert call(cases.packed_in_window, documents, joint) == [forward, ("packed_attention_backward", *forward[1:])]


def test_what_windows_reach_on_other_ranks_is_one_call_each(call: Call) -> None:
    """Of the chunks 0 and 3, each of 16 positions, the second attends to the end of chunk 2."""
    found = call(cases.attended_in_window, "ring", Scores(10), torch.bfloat16)
    assert found == call(cases.attended_in_window, "all_gather", Scores(10), torch.bfloat16)
    forward = [entry for entry in found if entry["name"] == "forward"]
    own = {"name": "forward", "queries": 16, "keys": 16, "causal": True, "window_size_left": 9, "window_size_right": 0}
    far = {"name": "forward", "queries": 9, "keys": 9, "causal": False, "window_size_left": 0, "window_size_right": -1}
    assert forward == [own] * 4 + [far] * 2
    assert len(found) == 2 * len(forward)


@pytest.mark.parametrize("kind", [Scores(10, 30.0), Scores(None, 30.0)])
def test_flash_attention_is_not_asked_for_what_it_cannot_do(kind: Scores, call: Call) -> None:
    assert call(cases.attended_in_window, "ring", kind, torch.bfloat16) == []
    assert call(cases.attended_in_window, "ring", Scores(10), torch.float32) == []


def test_capped_scores_of_whole_sequences_are_left_to_flex_attention(call: Call) -> None:
    assert call(cases.generated, 10) == [("cuda:0", "cuda:0", [2, 1, 3, 3])]


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16", (4, 2, True, ("FLASH_ATTENTION",))), ("fp32", (4, 4, False, ("EFFICIENT_ATTENTION",)))],
)
def test_pytorch_is_given_one_kernel_and_the_heads_that_it_takes(precision: Any, expected: Any, call: Call) -> None:
    assert call(cases.given_to_sdpa, replace(PLAIN, train=Train(precision=precision))) == {expected}


@pytest.mark.parametrize(
    "case",
    [
        *("resident", "host", "host, update there", "muon", "muon, host", "recompute"),
        *("all on the host", "all on the host, update there", "muon, all on the host"),
    ],
)
def test_a_step_leaves_everything_where_it_belongs(case: str, call: Call) -> None:
    config = {
        "resident": PLAIN,
        "host": replace(PLAIN, optim=Optim(placement="host")),
        "host, update there": replace(PLAIN, optim=Optim(placement="host", update_on="host")),
        "muon": replace(PLAIN, optim=Optim("muon")),
        "muon, host": replace(PLAIN, optim=Optim("muon", placement="host")),
        "recompute": replace(PLAIN, train=replace(PLAIN.train, recompute="selective")),
        "all on the host": replace(ON_HOST, optim=Optim(placement="host")),
        "all on the host, update there": replace(ON_HOST, optim=Optim(placement="host", update_on="host")),
        "muon, all on the host": replace(ON_HOST, optim=Optim("muon", placement="host")),
    }[case]
    found = call(cases.stepped, config)
    assert found["parameters"] == {"cpu" if "all" in case else "cuda:0"}
    assert found["signs"] == ("cuda:0", "cpu", True)
    assert found["skips"] == ({"cpu"} if "there" in case else {"cuda:0"})
    assert found["moments"] == ({"cpu"} if "host" in case else {"cuda:0"})
    assert found["counts"] == found["skips"]
    assert found["settled"] == ("host" in case and "there" not in case)


def test_a_copy_to_the_host_waits_for_the_tensor_and_keeps_it(call: Call) -> None:
    assert call(cases.copied_to_host) == ["wait", "record"]


def test_host_memory_is_registered_by_whole_pages_once_and_unregistered(call: Call) -> None:
    told, pinned, after = call(cases.host_memory, False)
    assert [(name, size, flags) for name, _, size, flags in told] == [
        ("register", pages * mmap.PAGESIZE, 1) for pages in (1, 1, 3)
    ]
    assert not any(pinned)
    assert sorted(address for _, address in after) == sorted(address for _, address, *_ in told)


def test_host_memory_that_cuda_does_not_register_is_pytorchs(call: Call) -> None:
    told, pinned, after = call(cases.host_memory, True)
    assert [name for name, *_ in told] == ["register"]
    assert (pinned, after) == ([True] * 3, [])


def test_offloaded_activations_have_blocks_of_their_own_and_come_back(call: Call) -> None:
    offload = replace(PLAIN, train=replace(PLAIN.train, offload_activations=True))
    first, second = call(cases.offloaded, offload)
    registered, copied, recorded = first
    assert registered == copied > 0
    assert recorded >= 2 * copied, "each is recorded on the stream that copies it, and on that which uses it"
    assert second == (0, copied, recorded), "the blocks of the first step are used again"


def test_buckets_of_states_are_copied_in_and_out_on_streams_of_their_own(call: Call) -> None:
    """An update waits for the bucket, the way out for the update, and a slot for the way out of the bucket before."""
    found = call(cases.streamed)
    expected = [("wait", "in", "compute")]
    for bucket in range(5):
        expected += [("wait", "in", "out")] * (bucket >= 3)
        expected += [("copy", "in"), ("wait", "compute", "in"), ("update",)]
        expected += [("wait", "out", "compute"), ("copy", "out")]
    assert found == [*expected, ("wait", "compute", "out")]


def test_parameters_are_copied_from_the_host_while_the_layer_before_computes(call: Call) -> None:
    """Each copy waits for what was launched before, which may use its memory, and a layer for its copy alone."""
    order = ["embed", "layers.0", "layers.1", "head"]
    passes: list[list[tuple[str, ...]]] = []
    for names in (order, order[::-1]):
        begun = [[("wait", "copies", "compute"), ("copy", "copies", name)] for name in names]
        found = begun.pop(0)
        for name in names:
            computes = [("compute", name)] if "layers" in name and names is order else []
            found += [("wait", "compute", "copies"), *(begun.pop(0) if begun else []), *computes]
        passes.append(found)
    expected = [*passes[0], *passes[1]]
    base = replace(ON_HOST, adapter=Adapter(rank=4))
    assert call(cases.fetched, base) == expected * 2, "of two micro-batches"
    trained = replace(ON_HOST, optim=Optim(placement="host", update_on="host"))
    assert call(cases.fetched, trained) == expected * 2


def test_saves_are_copied_beside_the_next_step_to_memory_that_is_registered_at_the_start(
    call: Call, tmp_path: Path
) -> None:
    told = call(cases.staged, PLAIN, tmp_path)
    assert (told["devices"], told["registered"]) == ({"cpu"}, told["pages"])
    first, *registered = told["begin"]
    assert (first, set(registered)) == (("set_device",), {("register",)}), "in the writer's thread"
    assert told["save"] == [("wait", "copies", "compute")]
    assert told["written"] == [("synchronize", "copies")]
    assert told["update"] == [("wait", "compute")]
    assert told["end"] == [("unregister",)] * len(registered)


def test_steps_stay_under_way_until_one_is_saved(call: Call) -> None:
    config = replace(
        PLAIN,
        train=Train(steps=4, precision="bf16"),
        log=Log(interval=1),
        checkpoint=Checkpoint(interval=3),
    )
    events, pinned = call(cases.trained, config)
    assert events == [
        *("launch 1", "launch 2", "read 1", "record 1", "launch 3", "read 2", "record 2", "read 3", "record 3"),
        *("synchronize", "save 3", "launch 4", "read 4", "record 4"),
        *("synchronize", "synchronize", "save 4"),  # a validation without data is due, too
    ]
    assert pinned == [True] * 4


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["alone", "tp", "pp"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_model_computes_on_its_device(parallel: dict[str, int], window: int | None, call: Call) -> None:
    """On the first stage, which is told what the last one draws."""
    config = spread(**parallel)
    config = replace(config, model=replace(config.model, attention=Attention(window=window)))
    sizes, devices = call(cases.inferred, config)
    logits = 128 // config.parallel.tp
    last = {"prompts": [3, logits], "next": [3, logits], "alone": [1, logits]}
    assert sizes == {**(last if config.parallel.pp == 1 else {}), "drawn": [3], "scores": [5, 2]}
    assert devices == {"cuda:0"}


# Gathers and scatters of 2 layers: forward has 2 and 2 in each, and backward 4 and 2. The embedding's output is
# scattered and the head's input gathered, in backward the other way round, and statistics of logits are gathered. In
# pieces, forward's are 4 times as many, and so are the gathers of gradients in backward.
CAPTURED_COLLECTIVES = {"whole": (15, 10), "in pieces": (39, 22)}


@pytest.mark.parametrize(
    ("tensor", "split"), [(None, "whole"), ("pieces", "whole"), ("pieces", "in pieces"), ("auto", "in pieces")]
)
def test_graphs_hold_operations_of_the_device_alone(tensor: Overlap | None, split: str, call: Call) -> None:
    """In none is a tensor of the host, a synchronization or an event; a number that assignments write is a constant.

    Collectives of tensor parallelism are in them, if there is any, and none on symmetric memory.
    """
    config = PLAIN if tensor is None else spread(tp=2, tensor=TensorParallel(tensor))
    config = replace(config, train=replace(config.train, cuda_graph=True))
    (first, second, third), made = call(cases.captured, config, 1 if split == "in pieces" else 1 << 40)
    assert first == ["captures wait for compute", "compute wait for captures"] * 2
    assert second == [
        "capture 0 in None on captures, thread_local",
        "captured 0",
        "replay 0",
        "capture 1 in pool on captures, thread_local",
        "captured 1",
        "replay 1",
    ]
    assert third == ["replay 0", "replay 1"]
    for operations in made:
        assert "aten.embedding_dense_backward.default" in operations
        assert {name for name in operations if name.startswith("host")} <= {
            "host: aten.lift_fresh.default",
            "host: aten.fill_.Tensor",
        }
        collectives = {name: times for name, times in operations.items() if name.startswith(("c10d", "symm_mem"))}
        names = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
        found = {} if tensor is None else dict(zip(names, CAPTURED_COLLECTIVES[split], strict=True))
        assert collectives == found
