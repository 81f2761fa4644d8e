"""Products fused with collectives of tensor parallelism: rules, texts, memory, and the planner's times."""

from dataclasses import replace
from typing import Any

import pytest

from megalite.config.model_schema import Adapter, Model
from megalite.config.parallel_schema import Overlap, Parallel, TensorParallel
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Run, Train
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import predict
from megalite.dry_run.configuration import as_counted
from megalite.plan.memory.peak import rank_memory
from megalite.plan.overlap import overlap_text

MODEL = Model(layers=3, width=64, heads=4, kv_heads=2, ffn=96, vocab_size=100, sequence_length=32)
NF4 = {"adapter": Adapter(base="nf4")}
ALONE = "collectives of tensor parallelism run"
FUSED = "collectives of tensor parallelism are fused with matrix products, through symmetric memory"
AS_PIECES = f"{ALONE} as with parallel.tensor.overlap = pieces"
TRIED = (
    f"{FUSED}, if the GPUs of a tensor-parallel group are in one node and read each other's memory, which a run tries"
)


def configured(overlap: Overlap, tp: int = 2, model: Model = MODEL, **changes: Any) -> Config:
    parallel = Parallel(tp=tp, dp_shard=1, tensor=TensorParallel(overlap))
    return replace(Config(model=model, parallel=parallel, batch=Batch(micro=4, global_=8)), **changes)


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"train": Train(precision="fp8")}, "train.precision = fp8"),
        ({"train": Train(product="my.products:NARROW")}, "train.product = my.products:NARROW"),
        (NF4, "adapter.base = nf4"),
    ],
    ids=["fp8", "another product", "four bits"],
)
def test_products_that_are_not_pytorchs_are_refused_and_left_alone(changes: dict[str, Any], other: str) -> None:
    told = (
        'parallel.tensor.overlap = "symmetric": fuses PyTorch\'s own matrix products alone with collectives, not those '
        f"of {other}; use pieces, or auto"
    )
    assert told in map(str, validate(configured("symmetric", **changes)))
    auto = configured("auto", **changes)
    assert not any(problem.key == "parallel.tensor.overlap" for problem in validate(auto))
    assert not auto.fuses_over_tp
    assert overlap_text(auto) == f"{AS_PIECES}, since no others than PyTorch's own products can be fused with them"


@pytest.mark.parametrize(
    ("overlap", "reason", "on_cpu", "told"),
    [
        ("pieces", None, False, ""),
        ("symmetric", None, False, f"{TRIED}; else a run ends"),
        ("auto", None, False, f"{TRIED}; else they run as with pieces"),
        ("symmetric", "", False, FUSED),
        ("auto", "of one", False, f"{AS_PIECES}, since of one"),
        ("auto", None, True, f"{AS_PIECES}, since a CPU has no symmetric memory"),
        (
            "symmetric",
            "",
            True,
            f"{ALONE} before or after matrix products, as PyTorch stands in for symmetric memory on a CPU",
        ),
    ],
)
def test_people_are_told_what_becomes_of_it(overlap: Overlap, reason: str | None, on_cpu: bool, told: str) -> None:
    assert overlap_text(configured(overlap), reason, on_cpu) == told
    assert overlap_text(configured(overlap, tp=1), reason, on_cpu) == ""


@pytest.mark.parametrize("overlap", ["symmetric", "auto"])
def test_memory_for_exchange_is_two_parts_of_an_output(overlap: Overlap) -> None:
    fused, apart = (rank_memory(configured(each), 0).total for each in (overlap, "pieces"))
    assert fused - apart == 2 * (4 * 32 // 2) * 64 * 2  # tokens of a rank, features, bytes in bf16


def test_auto_on_a_cpu_takes_the_memory_of_pieces() -> None:
    auto, pieces = (configured(each, run=Run(device="cpu")) for each in ("auto", "pieces"))
    assert rank_memory(auto, 0).total == rank_memory(pieces, 0).total
    assert not as_counted(auto).fuses_over_tp
    assert as_counted(configured("auto")).fuses_over_tp


def test_graphs_have_pieces() -> None:
    auto, pieces = (configured(each, train=Train(cuda_graph=True)) for each in ("auto", "pieces"))
    told = f"{AS_PIECES}, since operations on symmetric memory are not captured by train.cuda_graph"
    assert overlap_text(auto) == overlap_text(auto, "") == told
    assert not overlap_text(pieces)
    assert rank_memory(auto, 0).total == rank_memory(pieces, 0).total
    assert not as_counted(auto).fuses_over_tp
    assert any(
        "parallel.tensor.overlap" in str(each)
        for each in validate(replace(auto, parallel=configured("symmetric").parallel))
    )


def test_the_planner_takes_them_to_hide_as_much_as_pieces() -> None:
    cluster, large = load_cluster("h100"), replace(MODEL, width=4096, ffn=8192, sequence_length=8192)
    symmetric, pieces = (predict(configured(each, model=large), cluster) for each in ("symmetric", "pieces"))
    assert symmetric.seconds == pieces.seconds
