"""Passes in turns: what one sends travels while the other computes, and nothing else is saved."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.cluster import load_cluster
from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.kernels import launched
from megalite.cost.layer import LayerTime, Seconds
from megalite.cost.predict import Prediction, Trial, predict, timeline
from megalite.cost.rank_seconds import seconds_of
from megalite.cost.schedule_tables import Cost
from megalite.cost.stages import Timer, transfer_seconds
from megalite.cost.turns import LayerPass, StagePass, Stretch, in_turns, walked
from megalite.layout_search.turn_bounds import least_in_turns
from megalite.plan.resolved import resolve
from megalite.schedule.actions import Kind

ROUNDING = 1 + 1e-9
BESIDE = FITTED_CONSTANTS.beside
seconds = st.sampled_from([0.0, 0.3, 1.0, 4.0])
stretches = st.lists(st.builds(Stretch, seconds, seconds, seconds), max_size=4).map(tuple)
passes = st.builds(LayerPass, stretches, seconds, seconds)
layers = st.tuples(passes, passes)


def longer(one: float, other: float) -> float:
    """Overlap that costs nothing, for numbers that can be added up by hand."""
    return max(one, other)


def test_one_computes_while_the_other_s_rows_travel() -> None:
    """2, then 3 beside 5, 4 beside 6, and 1 beside nothing: the last stretches send nothing."""
    forward, backward = [Stretch(2, 5), Stretch(4)], [Stretch(3, 6), Stretch(1)]
    assert walked(forward, backward, longer) == 2 + 5 + 6 + 1
    assert walked(forward, backward, BESIDE) == pytest.approx(2 + (5 + 0.14 * 3) + (6 + 0.14 * 4) + 1)


def test_what_is_left_when_the_other_is_done_is_waited_for() -> None:
    """Two turns of forward beside two of backward; then 7 and 8 are waited for, but for 1 that hides beside 7."""
    forward = [Stretch(1, 2), Stretch(1, 2), Stretch(1, 7, own=1), Stretch(1, 8), Stretch(1)]
    assert walked(forward, [Stretch(2, 1), Stretch(2)], longer) == 1 + 2 + 1 + 2 + 1 + 7 + 1 + 8 + 1


def test_numbers_of_rows_take_a_turn() -> None:
    """Forward gives way three times a layer and backward twice, so backward is done before."""
    forward, backward = [Stretch(1), Stretch(0, 3), Stretch(1, 3)] * 2, [Stretch(0, 3), Stretch(1, 3)] * 2
    both = [*forward, Stretch(1)], [*backward, Stretch(1)]
    assert walked(*both, longer) == 1 + 0 + 3 + 3 + 3 + 3 + 3 + 1 + 3 + 3 + 1 + 3 + 1


@given(layers)
def test_turns_save_no_more_than_rows_on_their_way(pair: tuple[LayerPass, LayerPass]) -> None:
    forward, backward = ([*each.stretches, Stretch(each.rest)] for each in pair)
    found, sends = walked(forward, backward, BESIDE), sum(each.sent for each in (*forward, *backward))
    alone = [each.compute + BESIDE(each.own, each.sent) for each in (*forward, *backward)]
    assert max(sum(each.computes for each in pair), sends) <= found * ROUNDING
    assert found <= sum(alone) * ROUNDING


@given(layers, st.integers(0, 7))
def test_rows_that_arrive_earlier_make_no_turns_longer(pair: tuple[LayerPass, LayerPass], at: int) -> None:
    every = [[*each.stretches, Stretch(each.rest)] for each in pair]
    before = walked(*every, BESIDE)
    of = every[at % 2]
    of[at // 2 % len(of)] = of[at // 2 % len(of)]._replace(sent=0.0)
    assert walked(*every, BESIDE) <= before * ROUNDING


@given(st.lists(st.tuples(layers, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3))
def test_layers_take_as_long_at_least_as_their_sums_tell(
    model: list[tuple[tuple[LayerPass, LayerPass], int, int]],
) -> None:
    """Two stages with some layers of each kind: none of them has to be alike."""
    times = [(LayerTime(Seconds(), Seconds(), 0.0, Seconds(), turns), count) for turns, count, _ in model]
    assume(any(each.computes or each.launches for turns, _, _ in model for each in turns))
    least = least_in_turns(times, FITTED_CONSTANTS.overlap)
    one, other = (
        [each for each, (_, count, more) in zip(least, model, strict=True) for _ in range(number(count, more))]
        for number in (lambda count, more: count, lambda count, more: more)
    )
    forward, backward = (
        StagePass(
            tuple(turns[at] for turns, count, more in model for _ in range((count, more)[at])),
            *(0.0, 0.0, 0.0, 0.0),
            (0.0,),
            BESIDE,
        )
        for at in (0, 1)
    )
    bound = sum(there for there, _ in one) + sum(back for _, back in other)
    assert bound <= in_turns(forward, backward, 0.0, (0.0,)).total * ROUNDING
    for (there, back), ((first, second), _, _) in zip(least, model, strict=True):
        for each, of in ((there, first), (back, second)):
            alone = of.rest + sum(stretch.compute + BESIDE(stretch.own, stretch.sent) for stretch in of.stretches)
            assert each <= launched(alone, of.launches) * ROUNDING


def test_passes_in_turns_wait_for_launches_weights_links_and_the_host_together() -> None:
    layer = LayerPass((Stretch(1, 2),), 1, launches=3)
    alone = StagePass((layer,), 0.5, 0.0, 0.0, 0.0, (0.0, 0.0), longer)
    found = in_turns(alone, alone, 0.0, (0.0, 0.0))
    assert found.computes + found.experts == 1 + 2 + 2 + 1 + 1.0  # 1 beside 2 each time, and two times 0.5 besides
    assert found.host == pytest.approx((6**3 + 6**3) ** (1 / 3) - 6)
    gathers = replace(alone, gathered=20.0, first=0.25)
    assert in_turns(gathers, gathers, 2.0, (0.0, 0.0)).total == 42 + 2 * 0.25
    assert in_turns(alone, replace(alone, links=(0.0, 30.0)), 0.0, (0.0, 5.0)).total == 35
    offloads = in_turns(replace(alone, moved=8.0), replace(alone, moved=9.0), 0.0, (0.0, 0.0))
    assert offloads.total == 9 + 1


def config_of(*keys: str, gpus: int = 16) -> Config:
    every = [
        *("model.layers=12", "model.sequence_length=4096", "batch.micro=1", "batch.global=48", "parallel.ep=4"),
        *("parallel.pp=4", "parallel.dp_shard=4", "parallel.pipeline.schedule=dualpipev", "parallel.data.mode=zero1"),
    ]
    return check(load(["configs/model/qwen3_30b_a3b.yaml"], ["run.device=cuda", *every, *keys]), gpus)


def predicted(config: Config, cluster: str = "l40s") -> Prediction:
    return predict(config, load_cluster(cluster))


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
def test_a_step_knows_its_turns(mode: str) -> None:
    """It waits less for rows and weights, and computes as long; all of it still adds up to the step."""
    keys = f"parallel.data.mode={mode}", "train.recompute=none"
    turns, alone = (predicted(config_of(*keys, f"parallel.pipeline.overlap={each}")) for each in ("true", "false"))
    assert turns.seconds < 0.96 * alone.seconds
    waits = [each.parts["experts"] + each.parts["data"] for each in (turns, alone)]
    assert waits[0] < 0.9 * waits[1]
    for kind in ("products", "attention", "passes"):
        assert turns.parts[kind] == pytest.approx(alone.parts[kind])
    assert sum(turns.parts.values()) == pytest.approx(turns.seconds)
    assert turns.parts["bubble"] >= 0
    pictured = timeline(turns, Timer(load_cluster("l40s")))
    assert pictured.table.pairs


def test_backward_s_share_has_what_its_reduction_adds() -> None:
    stages = predicted(config_of("parallel.data.mode=zero2")).stages
    costs = [Cost(Kind.F, 1, beside=6), Cost(Kind.B, 6, beside=1), Cost(Kind.B, 6, True, True, beside=1)]
    forward, backward, reduces = (seconds_of(cost, stages) for cost in costs)
    both = stages[1].beside(stages[6])
    assert forward + backward == pytest.approx(both.total)
    assert forward / backward == pytest.approx(stages[1].forward.total / stages[6].backward.total)
    assert forward + reduces == pytest.approx(stages[1].beside(stages[6], True, True).total)
    assert reduces > backward
    assert stages[1].beside(stages[6]) != stages[6].beside(stages[1])  # forward of the one, backward of the other


def test_full_recompute_sends_rows_once_more_and_gives_way_as_often() -> None:
    layer, again = (
        Timer(load_cluster("l40s")).stages(predicted(config_of(f"train.recompute={mode}")).plan)[1].turns
        for mode in ("none", "full")
    )
    assert layer is not None
    assert again is not None
    sent, sent_again = ([stretch.sent for stretch in each.backward.layers[0].stretches] for each in (layer, again))
    assert len(sent) == 2
    assert len(sent_again) == len(layer.forward.layers[0].stretches) == 3
    assert sum(sent_again) == pytest.approx(1.5 * sum(sent))
    computes = layer.forward.layers[0].computes + layer.backward.layers[0].computes
    assert again.backward.layers[0].computes == pytest.approx(computes)


def test_a_step_in_turns_that_is_cut_short_takes_as_long_as_the_whole() -> None:
    timer, config = Timer(load_cluster("l40s")), config_of("batch.global=400", "train.recompute=none")
    trial = Trial(resolve(config), timer)
    clock = timer.tables.clock(config, 100)
    whole, _ = clock.run(
        [seconds_of(cost, trial.stages) for cost in clock.classes], transfer_seconds(config, timer.net)
    )
    assert trial.clocked == pytest.approx(whole, rel=0.002)
    assert trial.least <= (whole + trial.update) * ROUNDING
