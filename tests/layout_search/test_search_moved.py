"""Layers moved off the fullest or the slowest pipeline ranks."""

import random
from itertools import product
from statistics import median

import pytest

from megalite.config.load import load
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import Trial
from megalite.cost.stages import Timer
from megalite.layout_search.micro_batches_in_flight import Flights, flights
from megalite.layout_search.pipeline_bounds import slowest, slowest_waiting
from megalite.layout_search.search import _all_ranks, _plan, search
from megalite.layout_search.space import Space
from megalite.layout_search.uneven_splits import MAX_LIMIT_FACTOR, MIN_LIMIT_FACTOR, MIN_SPEEDUP, Held, Load, ranks_of
from megalite.schedule.actions import Action, Kind
from megalite.schedule.generate import NAMES, orders_of

GIB = 2**30
TIMERS = {name: Timer(load_cluster(name)) for name in ("h100_sxm", "rtx4090")}
NO_FLIGHTS = Flights((), False)
FEW = {"parallel.tp": 1, "parallel.cp": 1, "batch.micro": 1, "train.recompute": "none"}
CASES = [  # model, keys, GPUs, cluster, share of what the fastest layout needs, pins
    ("llama3.2_1b", ["batch.global=16"], 4, "h100_sxm", 0.93, {**FEW, "parallel.pp": 4}),
    ("llama3.2_1b", ["batch.global=8", "model.layers=13"], 2, "rtx4090", 0.9, {**FEW, "parallel.pp": 2}),
    ("qwen3_8b", ["batch.global=12", "model.layers=8"], 3, "h100_sxm", 0.88, {**FEW, "parallel.pp": 3}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[2]} GPUs")
def test_the_search_finds_the_fastest_splits_that_fit(case: tuple) -> None:
    """Against all splits of all layouts, timed and walked through one by one."""
    model, keys, gpus, cluster, share, pins = case
    given = [*keys, *(f"{key}={value}" for key, value in pins.items())]
    config, timer = load([f"configs/model/{model}.yaml"], ["run.device=cuda", *given]), TIMERS[cluster]
    limit = share * search(config, gpus, timer, float("inf"), pins, wanted=1).results[0].memory
    found = search(config, gpus, timer, limit, pins, wanted=4)
    every = search(config, gpus, timer, limit, pins, wanted=4, exhaustive=True)
    assert [result.seconds for result in found.results] == pytest.approx(
        [result.seconds for result in every.results[: len(found.results)]], rel=1e-9
    )
    assert any(result.choice.split for result in found.results)
    layouts = [result.choice._replace(split=None) for result in every.results]
    assert len(set(layouts)) == len(layouts)
    best = {result.choice._replace(split=None): result.seconds for result in every.results}
    assert best == pytest.approx(one_by_one(Space(config, gpus, timer, pins, False, limit), limit), rel=1e-9)


def test_layers_are_moved_wherever_else_nothing_fits() -> None:
    pins = {**FEW, "parallel.pp": 4, "parallel.pipeline.schedule": "1f1b"}
    given = [f"{key}={value}" for key, value in pins.items()]
    config = load(["configs/model/llama3.2_1b.yaml"], ["run.device=cuda", "batch.global=16", *given])
    (result,) = search(config, 4, TIMERS["h100_sxm"], 16 * GIB, pins, wanted=1).results
    assert result.choice.split is not None
    assert result.memory <= 16 * GIB


def one_by_one(space: Space, limit: float) -> dict[object, float]:
    """By layout: seconds of the fastest of its splits that fits."""
    best: dict[object, float] = {}
    for shape in space.shapes(float("inf")):
        for pipeline in space.pipelines(shape.choice):
            layouts = list(space.layouts(shape, pipeline))
            wanted = [layout for _, layout in space.moves.wanted(shape, pipeline, layouts)]
            for _, layout in layouts:
                splits = [split for _, split in space.moves.splits(shape, layout)] if layout in wanted else []
                for split in (None, *splits):
                    plan = _plan(space, layout._replace(split=split))
                    assert plan is not None
                    if _all_ranks(plan, space.timer) <= limit:
                        seconds = Trial(plan, space.timer).seconds
                        best[layout] = min(seconds, best.get(layout, seconds))
    return best


def test_no_bound_of_a_moved_split_is_above_its_time() -> None:
    """And its ranks hold at least what is told of them: else, splits that fit would be left out."""
    draw, checked, close = random.Random(3), 0, []
    config = load(["configs/model/llama3_8b.yaml"], ["run.device=cuda", "batch.global=64"])
    for schedule in ("1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        pins = {"parallel.pipeline.schedule": schedule, "parallel.tp": 1, "parallel.cp": 2}
        space = Space(config, 16, TIMERS["h100_sxm"], pins, False, 30 * GIB)
        moved = [
            (shape, layout, split, max(shape.bound, pipelines, shared, bound))
            for shape in space.shapes(60 * GIB)
            for pipeline in space.pipelines(shape.choice)
            if (pipelines := space.moves.of_pipeline(shape, pipeline, space.estimate.memory(pipeline))) is not None
            for shared, layout in space.moves.wanted(shape, pipeline, space.layouts(shape, pipeline))
            for bound, split in space.moves.splits(shape, layout)
        ]
        for number, (shape, layout, split, bound) in enumerate(draw.sample(moved, 16)):
            choice = layout._replace(split=split)
            plan = _plan(space, choice)
            assert plan is not None
            assert list(plan.config.parallel.pipeline.split or []) == list(split)
            seconds = Trial(plan, space.timer).seconds * (1 + 1e-9)
            assert max(bound, space.least.of_layout(shape, choice), space.least.of_schedule(shape, choice)) <= seconds
            close.append(space.least.of_unsplit(shape, layout) / seconds)
            if number > 4:
                continue
            load_of = space.moves._load(shape, layout)
            ranks = [sum(split[stage] for stage in own) for own in load_of.ranks.stages]
            walked = _all_ranks(plan, space.timer)
            uneven = max(split) * max(space.estimate.kept(choice)) * 2 * choice.pp  # stages of a rank may differ
            assert space.moves._held(layout, load_of).most(ranks) <= walked + uneven * (schedule != "1f1b")
            checked += 1
    assert checked == 20
    assert median(close) > 0.85


def loads() -> list[Load]:
    """Pipelines of three ranks with one, two and four stages each, whose ends take longer than layers, or less."""
    ends = [(0.0, 0.0), (0.2, 1.3), (0.1, 2.6)]
    return [
        Load(ranks_of([4 // stages] * (3 * stages), [*range(3)] * stages), 1.0, 1.0, *each, NO_FLIGHTS, 0.0)
        for stages in (1, 2, 4)
        for each in ends
    ]


@pytest.mark.parametrize("of", loads(), ids=lambda of: f"{len(of.ranks.stages[0])} stages, head {of.head}")
def test_no_numbers_of_layers_are_faster_or_need_less_memory(of: Load) -> None:
    """Against all numbers of layers."""
    possible = [
        ranks
        for ranks in product(range(13), repeat=3)
        if sum(ranks) == 12 and all(number >= least for number, least in zip(ranks, of.ranks.fewest, strict=True))
    ]
    fastest = min(map(of.seconds, possible))
    assert of.seconds(of.quickest) == pytest.approx(fastest)
    least = slowest(12, 3, of.layer, of.head)
    assert least <= fastest * (1 + 1e-9)
    if len(of.ranks.stages[0]) == 1:  # the rank with the head may have no layer
        assert fastest <= least + of.embedding + 1e-9
    assert of.slow == (of.seconds(of.ranks.default) > (1 + MIN_SPEEDUP) * fastest)
    held = Held([3.0, 2.0, 1.0], [1.0, 0.0, 2.0])
    for most in of.levels:
        allowed = [ranks for ranks in possible if all(map(int.__le__, ranks, most))]
        flattest = held.flattest(most, of.ranks.fewest, 12)
        assert tuple(flattest) in allowed
        assert held.most(flattest) == min(map(held.most, allowed))
        split = of.split(flattest)
        assert [sum(split[stage] for stage in own) for own in of.ranks.stages] == flattest
        assert min(split[:-1]) > 0
    assert of.seconds(of.levels[0]) == pytest.approx(fastest)


def test_no_split_makes_ranks_wait_and_compute_for_less_than_is_told() -> None:
    """Against all numbers of layers; three of the cases are told to one part in ten."""
    draw, close = random.Random(5), []
    cases = [(2, 3, 11, 1.0, 1.6, 1.0, 1.0)]  # where the embedding counts
    for stages, _ in product((1, 2, 3), range(12)):
        layer, p = draw.uniform(0.5, 2), draw.choice([2, 3, 4])
        ends, before = (draw.choice([0.0, 4.0]), draw.uniform(0, 3)), layer * draw.choice([0.1, 0.6, 1.0])
        cases.append((stages, p, stages * p + draw.randrange(8), layer, *ends, before))
    for stages, p, layers, layer, embedding, head, before in cases:
        load_of = Load(ranks_of([1] * (stages * p), [*range(p)] * stages), 1.0, layer, embedding, head, NO_FLIGHTS, 0.0)
        best = float("inf")
        for ranks in product(range(layers + 1), repeat=p):
            if sum(ranks) == layers and all(map(int.__ge__, ranks, load_of.ranks.fewest)):
                waits, most = 0.0, 0.0
                for number, outer, first in zip(ranks, load_of.outer, load_of.split(ranks), strict=False):
                    most = max(most, waits + number * layer + outer)
                    waits += first * before
                best = min(best, most)
        told = slowest_waiting(layers, p, stages, layer, (embedding, head), before)
        assert told <= best * (1 + 1e-9)
        close.append(told / best)
    assert sorted(close)[-3] > 0.9


@pytest.mark.parametrize("schedule", NAMES)
def test_ranks_hold_as_many_micro_batches_as_is_told(schedule: str) -> None:
    for p, m in product((1, 2, 3, 5), (1, 2, 5, 12, 17)):
        for v in (2, 3) if schedule == "interleaved_1f1b" else (None,):
            placement, orders = orders_of(schedule, p, m, v)
            told = flights(schedule, p, m, len(placement) // p)
            for rank, number in enumerate(told.most):
                most, beside = counted(placement, orders[rank], rank, m)
                assert number <= most, (p, m, v, rank)
                assert not told.beside or number <= beside, (p, m, v, rank)


def counted(placement, order, rank: int, m: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """In flight on the stages of a rank: while all of them have weights; and gradients, of no micro-batch the last."""
    stages = [stage for stage, owner in enumerate(placement) if owner == rank]
    live, most, beside = 0, -1, -1
    done, begun = dict.fromkeys(stages, 0), set[int]()
    for kind, stage, _ in (action for action in order if isinstance(action, Action)):
        if kind is Kind.F:
            live += 1
            begun.add(stage)
        if len(begun) == len(stages) and all(done[each] < m for each in stages):
            most = max(most, live)
            beside = max(beside, live) if all(done.values()) else beside
        live -= kind in (Kind.B, Kind.I)
        done[stage] += kind in (Kind.B, Kind.W)
    return most, beside


def test_layers_are_moved_where_memory_is_short_or_a_rank_slow_and_nowhere_else() -> None:
    config = load(["configs/model/llama3_8b.yaml"], ["run.device=cuda", "batch.global=64"])
    pins = {"parallel.pp": 4, "parallel.pipeline.schedule": "1f1b"}
    for gib in (20, 40, 80, 300):
        space = Space(config, 16, TIMERS["h100_sxm"], pins, False, gib * GIB)
        for shape in list(space.shapes(float("inf")))[::7]:
            pipeline = next(space.pipelines(shape.choice))
            layouts = list(space.layouts(shape, pipeline))
            wanted = {layout for _, layout in space.moves.wanted(shape, pipeline, layouts)}
            for _, layout in layouts:
                load_of = space.moves._load(shape, layout)
                share = space.moves._held(layout, load_of).most(load_of.ranks.default) / (gib * GIB)
                reason = (share > MIN_LIMIT_FACTOR or load_of.slow) and share <= MAX_LIMIT_FACTOR
                assert (layout in wanted) <= reason
                assert layout in wanted or not reason or not list(space.moves.splits(shape, layout))
            if gib == 300 and not load_of.slow:
                assert not wanted
