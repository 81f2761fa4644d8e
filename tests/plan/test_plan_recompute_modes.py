"""Which layers recompute."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel, Pipeline
from megalite.config.schema import Config, Train
from megalite.plan.pipeline import as_full, table_of
from megalite.plan.recompute_modes import (
    GIB,
    MODES,
    Costs,
    Mode,
    ModeCost,
    _choose_mixed,
    choose,
    choose_for_all,
    every_nth,
    held_by_rank,
    in_flight,
    kept_by_rank,
)
from megalite.schedule.generate import NAMES, build
from megalite.schedule.simulate import simulate

COSTS: dict[Mode, ModeCost] = {"none": ModeCost(1.0, 30), "selective": ModeCost(1.1, 20), "full": ModeCost(1.4, 5)}
costs = st.fixed_dictionaries(
    {mode: st.builds(ModeCost, st.integers(0, 9).map(float), st.integers(0, 9)) for mode in MODES}
)
held = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def seconds(costs: dict[Mode, ModeCost], modes: tuple[Mode, ...]) -> float:
    return sum(costs[mode].seconds for mode in modes)


def everywhere(costs: Costs, held: Sequence[Sequence[int]]) -> list[list[Costs]]:
    return [[costs] * len(layers) for layers in held]


def test_the_configuration_has_these_modes() -> None:
    assert (*MODES, "budget") == get_args(Train.__annotations__["recompute"])


def kept_bytes(costs: Mapping[Mode, ModeCost], held: Sequence[int], modes: Sequence[Mode]) -> int:
    """Bytes that a rank's layers keep when each holds its most micro-batches."""
    return sum(count * costs[mode].bytes for count, mode in zip(held, modes, strict=True))


@given(costs, held, st.integers(0, 200))
def test_the_choice_fits_and_none_that_fits_is_cheaper(
    costs: dict[Mode, ModeCost], held: list[int], limit: int
) -> None:
    everything = list(product(MODES, repeat=len(held)))
    fitting = [modes for modes in everything if kept_bytes(costs, held, modes) <= limit]
    chosen = choose([costs] * len(held), held, limit)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    assert kept_bytes(costs, held, chosen) <= limit
    assert seconds(costs, tuple(chosen)) == min(seconds(costs, modes) for modes in fitting)


@given(st.lists(st.tuples(costs, st.integers(0, 5)), min_size=1, max_size=5), st.integers(0, 200))
def test_of_layers_that_differ_no_choice_that_keeps_as_little_is_faster(
    layers: list[tuple[dict[Mode, ModeCost], int]], limit: int
) -> None:
    each, held = [cost for cost, _ in layers], [count for _, count in layers]

    def kept(modes: Sequence[Mode]) -> int:
        return sum(count * cost[mode].bytes for (cost, count), mode in zip(layers, modes, strict=True))

    def took(modes: Sequence[Mode]) -> float:
        return sum(cost[mode].seconds for cost, mode in zip(each, modes, strict=True))

    everything = list(product(MODES, repeat=len(layers)))
    chosen = _choose_mixed(each, held, limit)
    if chosen is None:
        assert min(map(kept, everything)) > limit
        return
    assert kept(chosen) <= limit
    assert took(chosen) == min(took(modes) for modes in everything if kept(modes) <= kept(chosen))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10_000, {"none": 4}),
        (3 * 120, {"none": 4}),
        (3 * 120 - 1, {"none": 3, "selective": 1}),
        (3 * 80, {"selective": 4}),
        (3 * 80 - 1, {"none": 1, "selective": 2, "full": 1}),
        (3 * 20, {"full": 4}),
    ],
)
def test_less_memory_takes_more_recompute(limit: int, expected: dict[Mode, int]) -> None:
    chosen = choose([COSTS] * 4, [3] * 4, limit)
    assert chosen is not None
    assert {mode: chosen.count(mode) for mode in expected} == expected


def test_layers_that_hold_more_micro_batches_recompute_first() -> None:
    assert choose([COSTS] * 3, [1, 4, 2], 4 * 5 + (1 + 2) * 30) == ["none", "full", "none"]


def test_every_nth_counts_from_the_first_layer() -> None:
    assert every_nth("full", 2, 5) == ["full", "none", "full", "none", "full"]
    assert every_nth("selective", 1, 3) == ["selective"] * 3
    assert every_nth("full", 4, 0) == []


@given(st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2"]), st.integers(1, 4), st.integers(1, 9))
def test_one_stage_is_in_flight_as_simulated(name: str, ranks: int, micro_batches: int) -> None:
    table = build(name, ranks, micro_batches)
    for rank, peak in enumerate(simulate(table).peak_live):
        assert in_flight(table, rank) == {rank: peak}


@pytest.mark.parametrize(("name", "virtual"), [("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)])
def test_stages_of_a_rank_are_counted_each_at_its_fullest(name: str, virtual: int) -> None:
    table = build(name, 4, 8, virtual)
    for rank, peak in enumerate(simulate(table).peak_live):
        found = in_flight(table, rank)
        assert tuple(found) == table.stages_of(rank)
        assert max(found.values()) <= peak <= sum(found.values())


def test_layers_hold_what_their_stage_does() -> None:
    assert held_by_rank([build("1f1b", 3, 8)], [2, 3, 1]) == [[3, 3], [2, 2, 2], [1]]


def test_of_several_steps_each_layer_holds_the_most() -> None:
    few, many = (build("interleaved_1f1b", 2, m, 2) for m in (3, 4))
    assert held_by_rank([few], [1, 1, 1, 1]) == [[3, 3], [3, 1]]
    assert held_by_rank([few, many], [1, 1, 1, 1]) == held_by_rank([many, few], [1, 1, 1, 1]) == [[4, 3], [3, 1]]


def test_what_is_kept_outside_of_layers_is_so_for_every_micro_batch_in_flight() -> None:
    assert kept_by_rank([build("1f1b", 3, 8)], {0: 10, 2: 7}) == [30, 0, 7]
    assert kept_by_rank([build("zbv", 2, 8)], {0: 10, 3: 7}) == [in_flight(build("zbv", 2, 8), 0)[0] * 10 + 7, 0]
    assert choose_for_all(everywhere(COSTS, [[3, 3], [1, 1]]), [[3, 3], [1, 1]], [0, 45], 60 / GIB) == [
        ["full", "full"],
        ["full", "full"],
    ]


def test_every_rank_gets_a_choice_of_its_own() -> None:
    assert choose_for_all(everywhere(COSTS, [[3, 3], [1, 1]]), [[3, 3], [1, 1]], [0, 0], 60 / GIB) == [
        ["full", "full"],
        ["none", "none"],
    ]


def test_the_least_limit_that_would_do_is_told_and_does() -> None:
    big = {mode: ModeCost(cost.seconds, cost.bytes << 20) for mode, cost in COSTS.items()}
    held = [[7] * 3, [50] * 3]
    with pytest.raises(InputError, match=r"train\.recompute_budget = 0\.5: .* use at least 0\.733"):
        choose_for_all(everywhere(big, held), held, [0, 0], 0.5)
    assert choose_for_all(everywhere(big, held), held, [0, 0], 0.733)[1] == ["full"] * 3
    with pytest.raises(InputError):
        choose_for_all(everywhere(big, held), held, [0, 0], 0.732)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40))
def test_as_many_are_in_flight_in_the_shorter_schedule(name: str, p: int, v: int, m: int) -> None:
    pipeline = Pipeline(name, v if name == "interleaved_1f1b" else None)
    layers = p * pipeline.stages_per_rank
    config = Config(model=Model(layers), parallel=Parallel(pp=p, dp_shard=1, pipeline=pipeline))
    full, shorter = table_of(config, m), table_of(config, as_full(config, m))
    assert [in_flight(full, rank) for rank in range(p)] == [in_flight(shorter, rank) for rank in range(p)]
