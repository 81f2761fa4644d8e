from dataclasses import replace

import pytest

from megalite.config.load import load
from megalite.config.validate import check
from megalite.plan.size import model_parameters
from megalite.planner.hardware import load_cluster
from megalite.planner.predict import Prediction, predict
from megalite.planner.stages import Timer
from megalite.planner.traffic import Flow, flows

TIMER = Timer(load_cluster("h100_sxm"))


def planned(gpus: int, *overrides: str) -> tuple[Prediction, dict[str, Flow]]:
    config = check(load(["configs/model/small_60m.yaml"], ["batch.global=64", *overrides]), gpus)
    prediction = predict(config, TIMER.cluster, TIMER)
    return prediction, {flow.axis: flow for flow in flows(prediction, TIMER)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "layout", [("parallel.tp=4",), ("parallel.tp=2", "parallel.pp=2"), ("parallel.tp=2", "parallel.cp=2")]
)
def test_what_nothing_hides_takes_as_long_as_the_model_says(layout: tuple[str, ...], recompute: str):
    options = *layout, f"train.recompute={recompute}", "parallel.context.method=ulysses"
    prediction, found = planned(8, *options)
    for axis, part in (("tp", "tensor"), ("cp", "context")):
        if axis in found:
            assert found[axis].seconds == pytest.approx(prediction.parts[part], rel=1e-9)
            assert found[axis].exposed == prediction.parts[part]
    assert "tp" in found
    assert ("cp" in found) == ("parallel.cp=2" in layout)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_more_context_is_sent_than_exposed(method: str):
    prediction, found = planned(4, "parallel.cp=4", f"parallel.context.method={method}")
    assert 0 <= prediction.parts["context"] <= found["cp"].seconds


@pytest.mark.parametrize(("mode", "gathered", "reduced"), [("zero1", 1, 1), ("zero2", 1, 16), ("zero3", 32, 16)])
def test_shards_send_all_parameters(mode: str, gathered: int, reduced: int):
    prediction, found = planned(4, f"parallel.data.mode={mode}", "batch.micro=1")
    model = prediction.config.model
    size = model_parameters(model).total + (model.vocab_size * model.width if model.tie_embeddings else 0)
    sent = 3 / 4 * size * (2 * gathered + 4 * reduced)
    assert found["dp shards"].sent == pytest.approx(sent, rel=1e-3)  # the last norm is not counted
    assert list(found) == ["dp shards"]
    assert found["dp shards"].exposed == prediction.parts["data"]


def test_replicas_sum_what_shards_have_reduced():
    _, whole = planned(4, "parallel.data.mode=ddp")
    _, found = planned(8, "parallel.dp_replicate=4", "parallel.data.mode=zero1")
    assert found["dp replicas"].sent == pytest.approx(whole["dp replicas"].sent / 2)
    assert found["dp replicas"].group.stride == 2
    assert found["dp replicas"].exposed is None
    assert found["dp replicas"].part == "dp shards"


def test_pipeline_ranks_send_to_both_neighbours():
    prediction, found = planned(4, "parallel.pp=4", "batch.micro=2", "batch.global=16")
    model, ranks = prediction.config.model, prediction.busy.index(max(prediction.busy))
    stream = 2 * model.sequence_length * model.width * 2
    assert found["pp"].sent == 8 * stream * (1 if ranks in (0, 3) else 2)


def test_one_gpu_talks_to_nobody():
    assert planned(1)[1] == {}


def test_muon_sends_matrices_among_all_ranks_of_a_stage():
    _, found = planned(8, "parallel.pp=2", "optim.name=muon")
    assert (found["Muon"].group.size, found["Muon"].group.stride) == (4, 1)
    assert found["Muon"].sent > 0
    assert found["Muon"].part == "optimizer"


def test_slower_links_take_longer_for_the_same_bytes():
    prediction, found = planned(16, "parallel.tp=4")
    slow = Timer(replace(TIMER.cluster, network=replace(TIMER.cluster.network, bandwidth=1e9)))
    after = {flow.axis: flow for flow in flows(prediction, slow)}
    assert after["dp shards"].sent == found["dp shards"].sent
    assert after["dp shards"].seconds > 10 * found["dp shards"].seconds
    assert after["tp"].seconds == found["tp"].seconds
