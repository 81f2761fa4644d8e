"""Rules of CUDA graphs."""

import pytest

from megalite.base.errors import InputError
from megalite.config.load import load
from megalite.config.rules.validate import check, check_without_layout

GRAPH = "train.cuda_graph=true"
SPREAD = (
    "is for one data-parallel rank, and the layout has {}: FSDP2 gathers weights into memory that moves; use false, or "
    "one data-parallel rank: parallel.dp_shard=1 and parallel.dp_replicate=1"
)
BAD = {
    "parallel.dp_shard=4": SPREAD.format(4),
    "parallel.dp_replicate=2": SPREAD.format(2),
    "parallel.pp=2": "cannot be used with parallel.pp = 2, whose stages send each other messages in every micro-batch; "
    "use false, or parallel.pp=1",
    "parallel.cp=2": "cannot be used with parallel.cp = 2, whose attention sends keys and values between its blocks; "
    "use false, or parallel.cp=1",
    "parallel.tp=2 parallel.tensor.overlap=symmetric": "cannot be used with parallel.tensor.overlap = symmetric, whose "
    "ranks wait for each other inside of products; use false, or parallel.tensor.overlap=pieces",
    "run.device=cpu": "needs CUDA, but run.device = cpu; use false, or run.device=cuda",
    "parallel.pipeline.schedule=gpipe": "needs a forward pass and then its backward, which parallel.pipeline.schedule "
    "= gpipe does not promise; use false, or parallel.pipeline.schedule=1f1b",
    "parallel.data.mode=zero3": "cannot be used with parallel.data.mode = zero3, which frees weights after every use; "
    "use false, or parallel.data.mode=auto",
    "parallel.placement.parameters=host optim.placement=host": "cannot be used with parallel.placement.parameters = "
    "host, whose copies of weights come and go; use false, or parallel.placement.parameters=device",
    "train.offload_activations=true": "cannot be used with train.offload_activations, whose copies wait for each "
    "other; use false, or train.offload_activations=false",
    "train.product=my.module:PRODUCT": "cannot be used with train.product = my.module:PRODUCT, which may compute on "
    "the host; use false, or train.product=plain",
    "model.experts={count: 4, active: 2, width: 32}": "cannot be used with model.experts, which take other numbers of "
    "tokens in every micro-batch; use false",
    "model.mtp={depth: 1}": "cannot be used with model.mtp, whose losses have other shares in every step; use false",
    "data.mask_documents=true data.end_of_document=0": "cannot be used with data.mask_documents, as every micro-batch "
    "has other documents; use false, or data.mask_documents=false",
    "batch.curriculum={start: 128, tokens: 1000}": "cannot be used with batch.curriculum, whose sequences have other "
    "lengths; use false, or batch.curriculum=null",
    "adapter={rank: 4, dropout: 0.1}": "cannot be used with adapter.dropout, which drops other features for every "
    "token; use false, or adapter.dropout=0",
}


@pytest.mark.parametrize("overrides", BAD)
def test_graphs_are_refused_by_name_where_micro_batches_differ(overrides: str) -> None:
    changes = _split(overrides)
    with pytest.raises(InputError) as caught:
        check(load(["tiny_gqa"], [GRAPH, *changes]))
    assert [str(problem) for problem in caught.value.problems] == [f"train.cuda_graph = true: {BAD[overrides]}"]
    check(load(["tiny_gqa"], changes))


def test_a_search_for_layouts_refuses_graphs() -> None:
    told = (
        "train.cuda_graph = true: is for a layout with one data-parallel rank, and without pipeline and context "
        "parallelism, and this is a search for a layout; use false, or megalite plan --as-is"
    )
    with pytest.raises(InputError) as caught:
        check_without_layout(load(["tiny_gqa"], [GRAPH]))
    assert [str(problem) for problem in caught.value.problems] == [told]
    check_without_layout(load(["tiny_gqa"], [GRAPH]), searches=False)


@pytest.mark.parametrize(
    "override", ["batch.rampup={start: 2, tokens: 100}", "train.compile=true", "train.precision=fp8"]
)
def test_graphs_go_with_all_that_leaves_micro_batches_alike(override: str) -> None:
    check(load(["tiny_gqa"], [GRAPH, override, "batch.global=8"]), 1)


@pytest.mark.parametrize("overlap", ["pieces", "auto"])
def test_graphs_go_with_ranks_of_tensor_parallelism(overlap: str) -> None:
    """However `auto` would be settled without them: the planner and a run take pieces."""
    changes = [GRAPH, "parallel.tp=2", f"parallel.tensor.overlap={overlap}", "run.device=cuda"]
    assert not check(load(["tiny_gqa"], changes), 2).fuses_over_tp
    check(load(["tiny_gqa"], [GRAPH, "parallel.tensor.overlap=symmetric"]), 1)  # of one rank, nothing is sent


def _split(overrides: str) -> list[str]:
    """Overrides, of which values in braces have blanks."""
    return [overrides] if "{" in overrides else overrides.split()
