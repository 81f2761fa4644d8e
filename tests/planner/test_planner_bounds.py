"""No bound is above what it bounds: seconds that are simulated, memory that is walked through, and schedules."""

import random
from collections.abc import Iterator

import pytest

from megalite.config.load import load
from megalite.planner.bounds import longest_path
from megalite.planner.choice import Choice
from megalite.planner.flight import flight
from megalite.planner.hardware import load_cluster
from megalite.planner.least import Shape
from megalite.planner.predict import least_seconds, step_seconds
from megalite.planner.search import SHORT, _all_ranks, _likely_fullest, _plan, on_device
from megalite.planner.space import Space
from megalite.planner.stages import Timer
from megalite.schedule.actions import Action, Kind
from megalite.schedule.clock import Clock
from megalite.schedule.generate import NAMES, V_SHAPED, build, orders_of

SPACES = [  # model, keys, GPUs, cluster, pins, offload
    ("qwen3_32b", ["batch.global=64"], 32, "l40s", {"parallel.data.mode": "zero2", "parallel.pp": 4}, False),
    ("mistral_7b_v0.1", ["batch.global=24", "model.layers=11"], 12, "a100_40gb", {}, True),
    ("llama3_8b", ["batch.global=8", "train.recompute_every=2"], 8, "b200", {"train.recompute": "full"}, False),
    ("tiny_tied", ["batch.global=24", "parallel.data.reduce_precision=bf16", "optim.name=muon"], 6, "mi300x", {}, True),
    ("llama3.2_1b", ["batch.global=32", "train.offload_activations=true"], 8, "rtx4090", {"parallel.tp": 2}, False),
]
DRAWN = 14  # layouts of each space


def layouts(space: Space, seed: int) -> Iterator[tuple[Shape, float, float, Choice, Choice]]:
    """Some layouts, drawn at random: with the bounds of the nodes that lead to them, and a sibling."""
    draw, shapes = random.Random(seed), list(space.shapes(float("inf")))
    for _ in range(DRAWN):
        shape = draw.choice(shapes)
        sharings = list(space.sharings(shape))
        (shared_bound, shared), (_, other) = draw.choice(sharings), draw.choice(sharings)
        choice = draw.choice(list(space.choices(shape, shared)))
        bound = space.least.of_layout(shape, choice)
        sibling = choice._replace(mode=other.mode, replicas=other.replicas, shards=other.shards)
        yield shape, shared_bound, bound, choice, sibling


@pytest.mark.parametrize("case", SPACES, ids=lambda case: case[0])
def test_no_bound_is_above_the_time_and_no_estimate_above_the_walk(case: tuple) -> None:
    model, keys, gpus, cluster, pins, offload = case
    given = [*keys, *(f"{key}={value}" for key, value in pins.items())]
    timer = Timer(load_cluster(cluster))
    space = Space(load([f"configs/model/{model}.yaml"], ["run.device=cuda", *given]), gpus, timer, pins, offload)
    looked_at = 0
    for shape, shared_bound, bound, choice, sibling in layouts(space, len(model)):
        plan, beside = _plan(space, choice), _plan(space, sibling)
        if plan is None or beside is None:
            continue
        looked_at += 1
        seconds = step_seconds(plan, timer) * (1 + 1e-9)
        assert max(shape.bound, shared_bound, bound, least_seconds(plan, timer, SHORT)) <= seconds, choice
        if choice.pp > 1:
            assert space.least.of_schedule(shape, choice) <= seconds, choice
        walked = _all_ranks(plan, timer)
        assert space.least_memory(shape.choice, 0.0) <= space.estimate.memory(choice) <= walked, choice
        rank, peak = _likely_fullest(plan, float("inf"))
        assert 0.97 * walked <= on_device(peak) <= walked, choice
        space.estimate.learn(choice, rank, peak)
        assert space.estimate.memory(sibling) <= _all_ranks(beside, timer), (choice, sibling)
    assert looked_at > DRAWN / 2


def test_replicas_are_bounded_as_summed_once_a_step() -> None:
    """Summed after each micro-batch, they would make this bound twice the time, and a search would miss the layout."""
    timer = Timer(load_cluster("l40s"))
    config = load(["configs/model/qwen3_32b.yaml"], ["run.device=cuda", "batch.global=128"])
    space = Space(config, 64, timer, {}, False)
    choice = Choice(2, 2, "ulysses", 4, 1, "none", "interleaved_1f1b", 2, 2, 2, "zero2", False, False)
    shape = next(
        shape
        for shape in space.shapes(float("inf"))
        if all(getattr(shape.choice, key) == getattr(choice, key) for key in ("tp", "cp", "method", "pp", "micro"))
        and shape.choice.recompute == "none"
    )
    plan = _plan(space, choice)
    assert plan is not None
    assert 0.5 * step_seconds(plan, timer) < space.least.of_layout(shape, choice) <= step_seconds(plan, timer)


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_no_times_of_stages_make_a_v_shorter_than_its_longest_path(schedule: str) -> None:
    draw = random.Random(1)
    for p in range(1, 6):
        for m in range(1, 3 * p + 2):
            clock = Clock(build(schedule, p, m), lambda action: action.kind)
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
    clock = Clock(build(schedule, 4, 9), lambda action: (action.kind, action.stage))
    first, other = ([draw.random() for _ in clock.classes] for _ in range(2))
    chain, hops = clock.longest(first, 0.1)

    def seconds(costs: list[float]) -> float:
        return sum(count * cost for count, cost in zip(chain, costs, strict=True)) + hops * 0.1

    assert seconds(first) == pytest.approx(clock.run(first, 0.1)[1])
    assert seconds(other) <= clock.run(other, 0.1)[1] * (1 + 1e-9)


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
        now = live[0] if schedule in V_SHAPED else sum(live.values())
        if len(begun) == len(stages) and all(done[each] < m for each in stages):
            most = max(most, now)
            beside = max(beside, now) if all(done.values()) else beside
        live[stage] -= kind in (Kind.B, Kind.I)
        done[stage] += kind in (Kind.B, Kind.W)
    return most, beside
