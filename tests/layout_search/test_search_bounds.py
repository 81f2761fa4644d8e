"""No bound is above what it bounds: seconds that are simulated, memory that is walked through, and schedules."""

import random
from collections import Counter
from collections.abc import Iterator
from operator import mul
from statistics import median

import pytest

from megalite.config.load import load
from megalite.cost.cluster import load_cluster
from megalite.cost.layout_choice import Choice
from megalite.cost.predict import Trial
from megalite.cost.schedule_tables import named_clock
from megalite.cost.stages import Timer
from megalite.layout_search.micro_batches_in_flight import flight
from megalite.layout_search.pipeline_bounds import halved, longest_path
from megalite.layout_search.search import _all_ranks, _likely_fullest, _plan
from megalite.layout_search.shape import Shape
from megalite.layout_search.space import Space
from megalite.schedule.actions import Action, Kind
from megalite.schedule.clock import clock_of
from megalite.schedule.generate import NAMES, V_SCHEDULES, build, orders_of

IN_TURNS = {"parallel.pipeline.schedule": "dualpipev"}
SPACES = [  # model, keys, GPUs, cluster, pins, offload
    ("qwen3_32b", ["batch.global=64"], 32, "l40s", {"parallel.data.mode": "zero2", "parallel.pp": 4}, False),
    ("mistral_7b_v0.1", ["batch.global=24", "model.layers=11"], 12, "a100_40gb", {}, True),
    ("llama3_8b", ["batch.global=8", "train.recompute_every=2"], 8, "b200", {"train.recompute": "full"}, False),
    ("tiny_tied", ["batch.global=24", "parallel.data.reduce_precision=bf16", "optim.name=muon"], 6, "mi300x", {}, True),
    ("llama3_70b", ["batch.global=64"], 32, "h100_sxm", {}, False),
    ("llama3.2_1b", ["batch.global=32", "train.offload_activations=true"], 8, "rtx4090", {"parallel.tp": 2}, False),
    ("llama3.2_1b", ["batch.global=32"], 8, "l40s", {"parallel.tp": 2, "optim.placement": "/mnt/nvme"}, False),
    ("qwen3_30b_a3b", ["batch.global=64", "model.layers=9"], 16, "h100_sxm", {}, False),
    ("mixtral_8x7b", ["batch.global=32", "model.layers=6"], 8, "b200", {"parallel.data.mode": "zero2"}, True),
    ("tiny_moe", ["batch.global=24", "model.experts.first_dense=1"], 8, "rtx4090", {"parallel.ep": 4}, False),
    ("tiny_moe", ["batch.global=24", "parallel.experts.buffers=worst_case"], 8, "rtx4090", {}, False),
    (
        "tiny_moe",
        ["batch.global=64", "model.layers=8", "model.experts.width=64", "model.vocab_size=64"],
        8,
        "rtx4090",
        {"parallel.pipeline.schedule": "dualpipev", "parallel.ep": 2, "parallel.pp": 2},
        False,
    ),
    ("llama3_8b", ["batch.global=16", "adapter.rank=16", "model.sequence_length=2048"], 8, "rtx4090", {}, False),
    ("llama3_8b", ["batch.global=16", "adapter.rank=16", "adapter.base=nf4"], 8, "rtx4090", {"parallel.cp": 1}, False),
    ("tiny_moe", ["batch.global=24", "adapter.rank=4", "optim.name=muon"], 8, "rtx4090", {"parallel.ep": 2}, False),
    (
        "llama3_8b",
        ["batch.global=16", "adapter.rank=16", "parallel.placement.parameters=host"],
        2,
        "rtx4090",
        {},
        False,
    ),
    (
        "llama3_8b",
        ["batch.global=32", "parallel.placement.parameters=host", "optim.placement=host"],
        8,
        "rtx4090",
        {},
        True,
    ),
    ("olmoe_1b_7b", ["batch.global=32", "optim.name=muon"], 8, "l40s", {"parallel.data.mode": "ddp"}, False),
    ("deepseek_v2_lite", ["batch.global=96", "model.layers=11"], 16, "l40s", {**IN_TURNS, "parallel.ep": 4}, True),
    ("qwen3_30b_a3b", ["batch.global=64", "model.layers=9"], 16, "h100_sxm", {**IN_TURNS, "batch.micro": 1}, False),
    (
        "deepseek_v3",
        ["batch.global=96", "model.layers=12", "parallel.experts.buffers=worst_case", "train.recompute_every=2"],
        16,
        "rtx4090",
        {**IN_TURNS, "parallel.data.mode": "zero3", "parallel.cp": 1},
        False,
    ),
    (
        "qwen3_30b_a3b",
        ["batch.global=256", "model.layers=24"],
        32,
        "l40s",
        {**IN_TURNS, "parallel.data.mode": "zero3", "parallel.pp": 2, "parallel.tp": 1, "parallel.cp": 1},
        False,
    ),
]
DRAWN = 14  # layouts of each space


def layouts(space: Space, seed: int) -> Iterator[tuple[Shape, Choice, Choice, float]]:
    """Some layouts, drawn at random: each with its shape, its pipeline, and the highest bound of what leads to it."""
    draw, shapes = random.Random(seed), list(space.shapes(float("inf")))
    for _ in range(DRAWN):
        shape = draw.choice(shapes)
        pipeline = draw.choice(list(space.pipelines(shape.choice)))
        shared, choice = draw.choice(list(space.layouts(shape, pipeline)))
        bounds = shape.bound, shared, space.least.of_pipeline(shape, pipeline), space.least.of_layout(shape, choice)
        yield shape, pipeline, choice, max(bounds)


@pytest.mark.parametrize("case", SPACES, ids=lambda case: case[0])
def test_no_bound_is_above_the_time_and_no_estimate_above_the_walk(case: tuple) -> None:
    model, keys, gpus, cluster, pins, offload = case
    given = [*keys, *(f"{key}={value}" for key, value in pins.items())]
    timer = Timer(load_cluster(cluster))
    space = Space(load([f"configs/model/{model}.yaml"], ["run.device=cuda", *given]), gpus, timer, pins, offload)
    close = []
    for shape, pipeline, choice, bound in layouts(space, len(model)):
        plan = _plan(space, choice)
        if plan is None:
            continue
        trial = Trial(plan, timer)
        seconds = trial.seconds * (1 + 1e-9)
        assert max(bound, trial.least) <= seconds, choice
        if choice.pp > 1:
            assert space.least.of_schedule(shape, choice) <= seconds, choice
        walked = _all_ranks(plan, timer)
        assert space.estimate.memory(pipeline) <= space.estimate.memory(choice) <= walked, choice
        assert space.estimate.of_states(choice, any_schedule=True) <= walked, choice
        told = space.estimate.of_actions(choice, timer.tables, float("inf"))
        assert told <= walked, choice
        close.append(told / walked)
        assert 0.97 * walked <= _likely_fullest(plan, float("inf")) <= walked, choice
    assert len(close) > DRAWN / 2
    if model == "llama3_70b":  # of small models, what is needed for a moment is the largest part
        assert median(close) > 0.9


@pytest.mark.parametrize("case", SPACES, ids=lambda case: case[0])
def test_no_first_bound_is_above_that_of_its_shape(case: tuple) -> None:
    model, keys, gpus, cluster, pins, offload = case
    given = [*keys, *(f"{key}={value}" for key, value in pins.items())]
    config = load([f"configs/model/{model}.yaml"], ["run.device=cuda", *given])
    space = Space(config, gpus, Timer(load_cluster(cluster)), pins, offload)
    firsts = list(space.firsts(float("inf")))
    ratios = [bound / space.shape(first).bound for bound, first in firsts]
    assert max(ratios) <= 1
    if model == "llama3_70b":  # small models wait for launches
        assert median(ratios) > 0.5


def test_replicas_are_bounded_as_summed_once_a_step() -> None:
    """Summed after each micro-batch, they would make this bound twice the time, and a search would miss the layout."""
    timer = Timer(load_cluster("l40s"))
    config = load(["configs/model/qwen3_32b.yaml"], ["run.device=cuda", "batch.global=128"])
    space = Space(config, 64, timer, {}, False)
    choice = Choice(2, 1, 2, "ulysses", 4, 1, "none", "interleaved_1f1b", 2, 2, 2, "zero2", False, "device")
    shape = next(
        shape
        for shape in space.shapes(float("inf"))
        if all(getattr(shape.choice, key) == getattr(choice, key) for key in ("tp", "cp", "method", "pp", "micro"))
        and shape.choice.recompute == "none"
    )
    plan = _plan(space, choice)
    assert plan is not None
    seconds = Trial(plan, timer).seconds
    assert 0.5 * seconds < space.least.of_layout(shape, choice) <= seconds


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_no_times_of_stages_make_a_v_shorter_than_its_longest_path(schedule: str) -> None:
    draw = random.Random(1)
    for p in range(1, 6):
        for m in range(1, 3 * p + 2):
            clock = clock_of(build(schedule, p, m), lambda action: action.kind)
            for times in ((1.0, 1.0, 1.0), *(tuple(draw.random() for _ in range(3)) for _ in range(2))):
                forward, inputs, weights = times
                costs = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights}
                end, _ = clock.run([costs[kind] for kind in clock.classes], 0.0)
                path = sum(count * time for count, time in zip(longest_path(schedule, p, m), times, strict=True))
                assert path <= end * (1 + 1e-9)
                if times == (1.0, 1.0, 1.0) and p <= m < 3 * p / 2:
                    assert path >= 0.95 * end - 2


@pytest.mark.parametrize("schedule", NAMES)
def test_a_chain_of_actions_takes_as_long_as_its_step_and_no_longer_than_others(schedule: str) -> None:
    draw = random.Random(2)
    clock = clock_of(build(schedule, 4, 9), lambda action: (action.kind, action.stage))
    first, other = ([draw.random() for _ in clock.classes] for _ in range(2))
    chain, hops = clock.longest(first, 0.1)

    def seconds(costs: list[float]) -> float:
        return sum(count * cost for count, cost in zip(chain, costs, strict=True)) + hops * 0.1

    assert seconds(first) == pytest.approx(clock.run(first, 0.1)[0])
    assert seconds(other) <= clock.run(other, 0.1)[0] * (1 + 1e-9)


def test_a_chain_ends_with_what_is_reduced_last() -> None:
    clock = named_clock(*orders_of("dualpipev", 4, 9), 9, "zero1")
    costs = [5.0 if cost.kind is Kind.REDUCE else 1.0 for cost in clock.classes]
    chain, hops = clock.longest(costs, 0.1)
    ended, computed = clock.run(costs, 0.1)
    assert sum(map(mul, chain, costs)) + hops * 0.1 == pytest.approx(ended)
    assert ended > computed


@pytest.mark.parametrize("schedule", NAMES)
def test_the_first_rank_holds_as_many_micro_batches_as_is_told(schedule: str) -> None:
    for p in range(1, 7):
        for m in range(1, 3 * p + 3):
            for v in (2, 3, 4) if schedule == "interleaved_1f1b" else (None,):
                told = flight(schedule, p, m, v or 1)
                most, beside = counted(schedule, p, m, v)
                assert told.most <= most, (p, m, v)
                assert told.beside is None or told.beside <= beside, (p, m, v)
                if p > 1:
                    assert told.most == most, (p, m, v)


def counted(schedule: str, p: int, m: int, v: int | None) -> tuple[int, int]:
    """In flight on the first rank: while all of its stages have weights; and gradients, of no micro-batch the last."""
    placement, orders = orders_of(schedule, p, m, v)
    stages = [stage for stage, rank in enumerate(placement) if rank == 0]
    live, done, begun = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), set[int]()
    most = beside = -1
    for kind, stage, _ in (action for action in orders[0] if isinstance(action, Action)):
        if kind is Kind.F:
            live[stage] += 1
            begun.add(stage)
        now = live[0] if schedule in V_SCHEDULES else sum(live.values())
        if len(begun) == len(stages) and all(done[each] < m for each in stages):
            most = max(most, now)
            beside = max(beside, now) if all(done.values()) else beside
        live[stage] -= kind in (Kind.B, Kind.I)
        done[stage] += kind in (Kind.B, Kind.W)
    return most, beside


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zbv", "dualpipev"])
def test_as_many_backward_passes_are_split_as_is_told(schedule: str) -> None:
    """Of each stage, and weighted by its layers."""
    draw, told = random.Random(2), 0
    for p in range(2, 8):
        for m in range(1, 4 * p):
            placement, orders = orders_of(schedule, p, m, None)
            split = [draw.randrange(1, 4) for _ in placement]
            counts = Counter(action.stage for order in orders for action in order if action.kind is Kind.I)
            each, layers = halved(schedule, split, m)
            assert each <= min(counts[stage] for stage in range(len(split)))
            assert layers <= sum(counts[stage] * number for stage, number in enumerate(split))
            told += each > 0
    assert told > 40
