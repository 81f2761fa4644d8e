from dataclasses import replace

import pytest

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.cluster import load_cluster
from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.flows import Flow, flows
from megalite.cost.muon import muon_matrices, muon_seconds
from megalite.cost.network import Group
from megalite.cost.predict import Prediction, predict
from megalite.cost.program import MEGALITE
from megalite.cost.stages import Timer
from megalite.plan.model.size import model_parameters

TIMER = Timer(load_cluster("h100_sxm"))
AT_ONCE = Timer(TIMER.cluster, replace(FITTED_CONSTANTS, launch=0.0, hop=0.0))  # transfers start at once
(NODE,) = TIMER.cluster.levels
WITHOUT_LINKS = Timer(
    replace(
        TIMER.cluster,
        levels=(replace(NODE, link=NODE.link.faster(1e9)),),
        network=TIMER.cluster.network.faster(1e9),
    ),
    AT_ONCE.constants,
)


def planned(gpus: int, *overrides: str) -> tuple[Prediction, dict[str, Flow]]:
    config = check(load(["configs/model/small_60m.yaml"], ["batch.global=64", *overrides]), gpus)
    prediction = predict(config, TIMER.cluster, TIMER)
    return prediction, {flow.axis: flow for flow in flows(prediction, TIMER)}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_activations_are_gathered_and_scattered(tp: int):
    """A layer gathers and scatters twice, backward as well, and gathers twice more. Ends have one each way."""
    prediction, found = planned(8, f"parallel.tp={tp}", "batch.micro=1", "train.recompute=none")
    model, m = prediction.config.model, 64 * tp // 8
    whole = 2 * model.sequence_length * model.width
    sent = (tp - 1) / tp * whole * m * (10 * model.layers + 4)
    assert found["tp"].sent == pytest.approx(sent, rel=0.01)  # and statistics of the loss
    waiting = Timer(AT_ONCE.cluster, AT_ONCE.constants, replace(MEGALITE, overlaps=False))
    model_of_times = predict(prediction.config, waiting.cluster, waiting).parts["tensor"]
    assert sent / found["tp"].bandwidth == pytest.approx(model_of_times, rel=0.01)
    assert found["tp"].group == Group(tp, 1)


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_context_is_sent_among_neighbours(method: str):
    _, found = planned(8, "parallel.tp=2", "parallel.cp=4", f"parallel.context.method={method}")
    assert found["cp"].group == Group(4, 2)
    assert found["cp"].sent > 0


@pytest.mark.parametrize(("mode", "gathered", "reduced"), [("zero1", 1, 1), ("zero2", 1, 16)])
def test_shards_send_all_parameters(mode: str, gathered: int, reduced: int):
    prediction, found = planned(4, f"parallel.data.mode={mode}", "batch.micro=1")
    model = prediction.config.model
    size = model_parameters(model).total + (model.vocab_size * model.width if model.tie_embeddings else 0)
    sent = 3 / 4 * size * (2 * gathered + 4 * reduced)
    assert found["fsdp"].sent == pytest.approx(sent, rel=1e-3)
    assert list(found) == ["fsdp"]
    assert found["fsdp"].part == "data"


def test_replicas_sum_what_shards_have_reduced():
    _, whole = planned(4, "parallel.data.mode=ddp")
    _, found = planned(8, "parallel.dp_replicate=4", "parallel.data.mode=zero1")
    assert found["dp_replicate"].sent == pytest.approx(whole["dp_replicate"].sent / 2)
    assert found["dp_replicate"].group.stride == 2
    assert found["dp_replicate"].part == "data"


def test_pipeline_ranks_send_to_both_neighbours():
    prediction, found = planned(4, "parallel.pp=4", "batch.micro=2", "batch.global=16")
    model, ranks = prediction.config.model, prediction.busy.index(max(prediction.busy))
    stream = 2 * model.sequence_length * model.width * 2
    assert found["pp"].sent == 8 * stream * (1 if ranks in (0, 3) else 2)


def test_one_gpu_talks_to_nobody():
    assert planned(1)[1] == {}


def test_muon_sends_matrices_among_all_ranks_of_a_stage():
    _, found = planned(8, "parallel.pp=2", "optim.name=muon")
    assert (found["stage"].group.size, found["stage"].group.stride) == (4, 1)
    assert found["stage"].sent > 0
    assert found["stage"].part == "optimizer"


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp_replicate=8", "parallel.dp_shard=8"),
        ("parallel.dp_shard=64",),
        ("parallel.dp_replicate=32", "parallel.dp_shard=2", "parallel.data.mode=zero3"),
        ("parallel.dp_replicate=64", "parallel.data.mode=ddp"),
        ("parallel.dp_replicate=4", "parallel.tp=4", "parallel.cp=4", "parallel.data.mode=ddp"),
        ("parallel.dp_shard=4", "parallel.tp=2", "parallel.cp=4", "parallel.pp=2"),
    ],
)
def test_muon_takes_as_long_as_it_sends(layout: tuple[str, ...]):
    """Updates go to every replica, momentum to owners once, and nowhere where all ranks have all of it."""
    keys = ["run.device=cuda", "parallel.dp_shard=1", *layout]
    prediction, found = planned(64, *keys, "optim.name=muon", "batch.micro=1")
    at_once = {flow.axis: flow for flow in flows(prediction, AT_ONCE)}
    of_plan = prediction.plan, muon_matrices(prediction.plan)
    computing = muon_seconds(*of_plan, WITHOUT_LINKS)
    assert muon_seconds(*of_plan, AT_ONCE) - computing == pytest.approx(at_once["stage"].seconds, rel=0.02)
    adamw, _ = planned(64, *keys, "batch.micro=1")
    more = prediction.parts["optimizer"] - adamw.parts["optimizer"]
    assert more == pytest.approx(muon_seconds(*of_plan, TIMER))
    assert more > found["stage"].seconds * 0.98


def test_slower_links_take_longer_for_the_same_bytes():
    prediction, found = planned(16, "parallel.tp=4")
    slow = Timer(replace(TIMER.cluster, network=replace(TIMER.cluster.network, bandwidth=1e9)))
    after = {flow.axis: flow for flow in flows(prediction, slow)}
    assert after["fsdp"].sent == found["fsdp"].sent
    assert after["fsdp"].seconds > 10 * found["fsdp"].seconds
    assert after["tp"].seconds == found["tp"].seconds


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.dp_replicate=2"),
        ("parallel.cp=4", "parallel.context.method=ring", "parallel.data.mode=zero3"),
        ("parallel.pp=2", "optim.name=muon"),
    ],
)
def test_a_flow_takes_its_bytes_over_its_bandwidth(layout: tuple[str, ...]):
    prediction, _ = planned(16, *layout)
    found = flows(prediction, AT_ONCE)
    assert len(found) >= 2
    for flow in found:
        assert flow.seconds == pytest.approx(flow.sent / flow.bandwidth)
        assert len(flow.ranks) == flow.group.size
        assert flow.ranks[-1] < 16
