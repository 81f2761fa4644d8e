"""Recompute and offload change what is kept, and nothing else."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from recompute_cases import (
    CPU,
    MODEL,
    budgeted,
    collectives_of,
    compare_within_budget,
    config_of,
    live_bytes,
    measured_and_planned,
    modes_of,
    one_layer,
    saved_bytes,
)
from torch import nn
from toy_jobs import one_rank

from megalite.commands.verify import Difference, compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Experts, Model, MultiToken
from megalite.config.parallel_schema import ExpertParallel, Parallel
from megalite.config.schema import Batch, Config, Optim, Train
from megalite.distributed.mesh import Mesh
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.offload import Offload, storage_of, to_host
from megalite.parallel.recompute import Cheap, recompute
from megalite.plan.recompute_modes import MODES, Mode

ONE, TP, PP, SHARDED = Layout(), Layout(tp=2), Layout(pp=2, tp=2), Layout(dp_shard=2, tp=2)
CONTEXT = Layout(cp=2, tp=2)
OFFLOADED = Optim(placement="host", clip_norm=0.01)
CASES: dict[str, Config] = {
    "selective": config_of(ONE, recompute="selective"),
    "selective tp": config_of(TP, recompute="selective"),
    "selective split backward": config_of(PP, "zb_h1", recompute="selective"),
    "selective sharded": config_of(SHARDED, recompute="selective", recompute_every=2),
    "full": config_of(ONE, recompute="full"),
    "full split backward": config_of(PP, "zbv", recompute="full", recompute_every=2),
    "offload": config_of(ONE, offload_activations=True),
    "offload split backward": config_of(PP, "zb_h1", offload_activations=True),
    "offload selective": config_of(PP, recompute="selective", offload_activations=True),
    "offload full": config_of(SHARDED, recompute="full", offload_activations=True),
    "selective ring": config_of(CONTEXT, recompute="selective"),
    "full ulysses": config_of(CONTEXT, context="ulysses", recompute="full"),
    "offload all_gather": config_of(CONTEXT, context="all_gather", offload_activations=True),
    "optimizer": replace(config_of(ONE), optim=OFFLOADED),
    "optimizer pipeline": replace(config_of(PP), optim=OFFLOADED),
    "optimizer sharded": replace(config_of(SHARDED), optim=OFFLOADED),
    "all": replace(
        config_of(PP, "interleaved_1f1b", recompute="selective", recompute_every=2, offload_activations=True),
        optim=OFFLOADED,
    ),
}


def differing(told: list[list[Difference]]) -> list[Difference]:
    assert len(told[0]) == 5
    return [difference for difference in told[0] if not difference.passed]


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process_that_keeps_everything(case: str, ranks: Ranks) -> None:
    assert differing(ranks.run(compare, CASES[case], 2, 1e-10)) == []


@pytest.mark.parametrize("layout", [PP, CONTEXT], ids=str)
def test_so_it_is_within_a_budget(layout: Layout, ranks: Ranks) -> None:
    assert differing(ranks.run(compare_within_budget, config_of(layout), 0.6)) == []


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("nope_every", [None, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_layer_saves(tp: int, nope_every: int | None, qk_norm: bool, ranks: Ranks) -> None:
    model = replace(MODEL, qk_norm=qk_norm, attention=Attention(nope_every=nope_every))
    found = ranks.run(saved_bytes, tp, model)[0]
    numbers = 8 * model.sequence_length * 2 // tp  # bytes of one value per token
    heads = (model.heads + model.kv_heads) * model.head_size
    cheap = 2 * model.width + model.ffn + heads * qk_norm  # two norms, SwiGLU; normalized and turned heads
    assert found["none"] - found["selective"] == numbers * cheap
    assert found["full"] == numbers * model.width


@pytest.mark.parametrize("nope_every", [None, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_layer_with_norms_after_saves(tp: int, nope_every: int | None, ranks: Ranks) -> None:
    after = replace(MODEL, norm="post", qk_norm_width="all", attention=Attention(nope_every=nope_every))
    found, alike = (ranks.run(saved_bytes, tp, replace(after, qk_norm=normed))[0] for normed in (True, False))
    numbers = 8 * after.sequence_length * 2 // tp
    heads = (after.heads + after.kv_heads) * after.head_size
    assert found["none"] - found["selective"] == numbers * (after.ffn + heads)
    assert found["none"] - alike["none"] == numbers * (heads + 2 * tp)  # two numbers for all heads of a token
    assert found["full"] == numbers * after.width


FORWARD = {"all_gather_single": 2, "reduce_scatter_single": 2}
BACKWARD = {"all_gather_single": 4, "reduce_scatter_single": 2}  # two inputs are gathered again


@pytest.mark.parametrize(
    ("mode", "again"),
    [("none", {}), ("selective", {}), ("full", {"all_gather_single": 2, "reduce_scatter_single": 1})],
)
def test_collectives_run_again_only_where_a_whole_layer_does(mode: Mode, again: dict[str, int], ranks: Ranks) -> None:
    forward, backward = ranks.run(collectives_of, 2, mode)[0]
    assert forward == FORWARD
    assert backward == Counter(BACKWARD) + Counter(again)
    after = replace(MODEL, norm="post", qk_norm_width="all")
    sums = Counter(start_all_reduce=2)  # of queries and of keys
    # The last norm needs what the MLP returns, so all of a layer runs again.
    more = sums + Counter(reduce_scatter_single=1) if mode == "full" else Counter[str]()
    forward, backward = ranks.run(collectives_of, 2, mode, after)[0]
    assert forward == Counter(FORWARD) + sums
    assert backward == Counter(BACKWARD) + Counter(again) + sums + more


def test_the_peak_of_a_step_falls_with_what_is_kept() -> None:
    model = replace(MODEL, layers=6, width=32, ffn=96, sequence_length=64)
    with one_rank():
        saved = saved_bytes(1, model)
        peaks = {
            (mode, offload): live_bytes(config_of(ONE, model=model, recompute=mode, offload_activations=offload))
            for mode in MODES
            for offload in (False, True)
        }
    assert saved is not None
    kept = {mode: peaks[mode, False]["activations"] for mode in MODES}
    assert kept["none"] > kept["selective"] > kept["full"]
    for mode in MODES:
        assert "host" not in peaks[mode, False]
        assert peaks[mode, True]["host"] == model.layers * saved[mode], "each storage once"
        here, without = (sum(peak.values()) - peak.get("host", 0) for peak in (peaks[mode, True], peaks[mode, False]))
        assert here < without - (model.layers - 3) * saved[mode], "two layers' copies are back at a time, at most"


def test_the_layer_before_comes_back_while_a_layer_runs_backward() -> None:
    with one_rank():
        mesh = Mesh.build(ONE, CPU)
        assert mesh is not None
        keeping = Offload()
        first, x = one_layer(mesh, MODEL, "none", keeping)
        second, _ = one_layer(mesh, MODEL, "none", keeping)
        middle = first(x, None)
        call = keeping._latest()
        output = second(middle, None)
        assert call is not None
        assert all(copy.fetched is None for copy in call.copies.values())
        torch.autograd.grad(output.sum(), middle, retain_graph=True)
        assert all(copy.fetched is not None for copy in call.copies.values())
        middle.sum().backward(retain_graph=True)
        assert all(copy.fetched is None for copy in call.copies.values()), "used, and gone"


def test_every_nth_layer_of_a_stage_recomputes(ranks: Ranks) -> None:
    config = config_of(Layout(pp=2), model=replace(MODEL, layers=5), recompute="full", recompute_every=2)
    split = replace(config.parallel.pipeline, split=[3, 2])
    told = ranks.run(modes_of, replace(config, parallel=replace(config.parallel, pipeline=split)))
    assert told[:2] == [["full", "none", "full"], ["full", "none"]]


@pytest.mark.parametrize("layout", [TP, PP, CONTEXT], ids=str)
def test_a_budget_is_kept_and_used(layout: Layout, ranks: Ranks) -> None:
    told = [found for found in ranks.run(budgeted, config_of(layout), 0.6) if found is not None]
    assert len(told) == layout.world_size
    for rank, found in enumerate(told):
        assert found.costs == told[0].costs, "as rank 0 has timed them"
        assert found.modes == told[rank - rank % (layout.cp * layout.tp)].modes, "recomputed layers share collectives"
        assert found.saved == [found.costs[mode].bytes for mode in found.modes]
        assert sum(held * saved for held, saved in zip(found.held, found.saved, strict=True)) <= found.limit
    assert any(mode != "none" for mode in told[0].modes)
    assert any(mode != "full" for mode in told[0].modes)


APART = Parallel(dp_shard=2, ep=2)


@pytest.mark.parametrize(
    ("parallel", "mtp"),
    [
        (APART, None),
        (replace(APART, experts=ExpertParallel("worst_case")), None),
        (Parallel(dp_shard=1, tp=4, ep=4), None),
        (Parallel(dp_shard=1), MultiToken(1)),
    ],
    ids=["ep", "worst case", "tp", "mtp"],
)
def test_layers_with_experts_are_measured_as_they_are_trained(
    parallel: Parallel, mtp: MultiToken | None, ranks: Ranks
) -> None:
    model = Model(2, 16, 4, 4, None, 20, 40, 32, experts=Experts(8, 2, 8), mtp=mtp)
    config = Config(
        model=model, parallel=parallel, batch=Batch(2, 2 * parallel.layout.dp), train=Train(precision="fp32")
    )
    measured = ranks.run(measured_and_planned, config)[0]
    assert len(measured) == 3 * (model.layers + model.depth)
    assert all(0 <= found - planned < 100 for found, planned in measured), "beside them, ends of rows in one buffer"


class Unneeded(nn.Module):
    """A layer whose cheap result backward has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.cheap = Cheap(lambda x: x + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = x + 1
        self.inside = storage_of(inside)
        return (self.cheap(inside) + 1).exp()


def test_nothing_is_kept_for_results_that_backward_does_not_need() -> None:
    layer = Unneeded()
    recompute(layer, "selective")
    y = layer(torch.ones(3, requires_grad=True))
    assert y.requires_grad
    assert layer.inside.expired()


def test_what_goes_to_the_host_is_a_copy() -> None:
    tensor = torch.rand(3)
    copy = to_host(tensor, HostMemory().empty_like(tensor), None)
    assert torch.equal(copy, tensor)
    assert storage_of(copy) != storage_of(tensor)


def test_an_evaluation_keeps_nothing() -> None:
    """Recompute and offload are for what has a backward pass."""
    with one_rank():
        mesh = Mesh.build(ONE, CPU)
        assert mesh is not None
        outputs = []
        for mode in MODES:
            stage, x = one_layer(mesh, MODEL, mode, Offload())
            with torch.no_grad():
                outputs.append(stage(x, None))
            assert not outputs[-1].requires_grad
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
