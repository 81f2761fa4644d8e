"""The order of `schedule: auto` by a cluster's times: never slower than a named one that fits, and within memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.cluster import load_cluster
from megalite.cost.order_costs import costing_of
from megalite.cost.predict import predict
from megalite.cost.stages import Timer
from megalite.plan.automatic import found, idle, wanted
from megalite.plan.memory.fit import GIB, TENSOR_SHARE, fitted
from megalite.plan.memory.peak import memory_of_ranks
from megalite.plan.pipeline import bubble, micro_batches, table_of
from megalite.schedule import search as searching
from megalite.schedule.generate import NAMES, build
from megalite.schedule.problem import Problem
from megalite.schedule.simulate import simulate

SIZES = ["model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1536"]
H100, L40S = load_cluster("h100_sxm"), load_cluster("l40s")
SLOW = replace(L40S, network=replace(L40S.network, bandwidth=1e8))  # where transfers and reductions take long


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "EFFORT", 10_000)


def configured(*overrides: str, dp: int = 1) -> Config:
    layout = ["parallel.pp=4", f"parallel.dp_shard={dp}", f"batch.global={12 * dp}", "batch.micro=1"]
    return check(load([], [*SIZES, *layout, "parallel.pipeline.schedule=auto", *overrides]))


def with_memory(bytes_of_gpu: float) -> Timer:
    return Timer(replace(H100, gpu=replace(H100.gpu, memory=bytes_of_gpu)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Config, Timer]:
    pp, dp = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 16]))
    config = configured(
        f"parallel.pp={pp}",
        f"parallel.dp_shard={dp}",
        f"batch.global={dp * draw(st.integers(1, 10))}",
        f"parallel.pipeline.virtual_stages={draw(st.sampled_from([1, 2]))}",
        f"parallel.data.mode={draw(st.sampled_from(['ddp', 'zero1', 'zero2', 'zero3']))}",
        f"model.layers={draw(st.integers(2 * pp, 9))}",
        f"model.vocab_size={draw(st.sampled_from([1024, 65536]))}",
        f"model.sequence_length={draw(st.sampled_from([256, 8192]))}",
        f"train.recompute={draw(st.sampled_from(['none', 'full']))}",
        f"train.compile={draw(st.sampled_from(['false', 'true']))}",
    )
    cluster = draw(st.sampled_from([H100, L40S, SLOW]))
    needed = max(memory.total for memory in memory_of_ranks(config))
    room = draw(st.floats(0.9, 1.5)) * needed / TENSOR_SHARE
    return config, Timer(replace(cluster, gpu=replace(cluster.gpu, memory=room)))


@settings(max_examples=25, derandomize=True)
@given(cases())
def test_no_named_schedule_that_keeps_to_the_memory_is_faster(case: tuple[Config, Timer]) -> None:
    """Not even where hardly any other order is tried."""
    searching.EFFORT = 1
    config, timer = case
    m, pipeline = micro_batches(config), config.parallel.pipeline
    asked = wanted(config, m, timer.costs)
    seconds = predict(config, timer.cluster, timer).seconds
    problem = Problem(asked.placement, m, asked.costs.stages, asked.limits, 0.0, asked.splits)
    for name in NAMES:
        try:
            named = build(name, config.parallel.pp, m, pipeline.stages_per_rank)
        except InputError:  # another number of stages
            continue
        fits = named.placement == asked.placement and problem.fits(problem.coded(named.orders))
        if fits and (asked.splits or not named.splits_backward):
            changed = replace(config.parallel, pipeline=replace(pipeline, schedule=name))
            other = replace(config, parallel=changed)
            assert seconds <= predict(other, timer.cluster, timer).seconds * (1 + 1e-9)


@pytest.mark.parametrize("overrides", [[], ["parallel.pipeline.virtual_stages=2"], ["train.compile=true"]])
def test_an_order_has_the_room_that_gpus_leave(overrides: list[str]) -> None:
    config = configured("parallel.data.mode=zero1", *overrides, dp=2)
    usual = max(memory.total for memory in memory_of_ranks(config))
    times = []
    for share in (0.97, 1.3):
        timer = with_memory(share * usual / TENSOR_SHARE)
        assert max(memory.total for memory in memory_of_ranks(config, timer.costs)) <= share * usual
        times.append(predict(config, timer.cluster, timer).seconds)
    assert times[1] < 0.99 * times[0]


def test_without_room_for_one_micro_batch_as_much_is_held_as_by_1f1b() -> None:
    config = configured()
    assert with_memory(1e6).costs(config).room is None
    limits = wanted(config, 12, with_memory(1e6).costs).limits
    assert limits == wanted(config, 12).limits
    assert set(limits) != set(wanted(config, 12, Timer(H100).costs).limits)


@pytest.mark.parametrize("overrides", [["parallel.pipeline.memory=0.1"], ["train.recompute=budget"]])
def test_memory_that_is_configured_is_the_limit(overrides: list[str]) -> None:
    config = configured(*overrides, *["train.recompute_budget=0.5"] * ("budget" in overrides[0]))
    costs = Timer(H100).costs(config)
    assert costs.room is None
    assert wanted(config, 12, Timer(H100).costs).limits == wanted(config, 12).limits


def test_memory_of_a_batch_is_a_limit_to_orders() -> None:
    free = configured()
    usual = max(memory.total for memory in memory_of_ranks(free, Timer(H100).costs)) / GIB
    tight = configured(f"batch.memory={0.8 * usual}")
    assert max(memory.total for memory in memory_of_ranks(tight, Timer(H100).costs)) <= 0.8 * usual * GIB
    found = fitted(replace(tight, batch=replace(tight.batch, micro="auto")), costing=Timer(H100).costs)
    assert found.batch.memory == tight.batch.memory
    assert max(memory.total for memory in memory_of_ranks(found, Timer(H100).costs)) <= 0.8 * usual * GIB


def test_a_larger_micro_batch_is_not_taken_because_fewer_would_be_under_way() -> None:
    long = "model.sequence_length=8192"
    one, two = configured(long), configured(long, "batch.micro=2")
    room = 1.2 * max(memory.total for memory in memory_of_ranks(one))
    timer = with_memory(room / TENSOR_SHARE)
    assert max(memory.total for memory in memory_of_ranks(two, timer.costs)) <= room, "an order for it would fit"
    assert fitted(configured(long, "batch.micro=auto"), round(room), costing=timer.costs).batch.micro_size == 1


def test_times_are_those_of_the_cluster_that_a_run_names() -> None:
    free = configured("model.vocab_size=32768")
    named = replace(free, run=replace(free.run, cluster="l40s"))
    costing = costing_of(named)
    assert costing_of(free) is None
    assert costing is not None
    assert costing(named) == Timer(L40S).costs(free)
    asked, of_flops = wanted(named, 12, costing), wanted(free, 12)
    assert (asked.costs.cluster, of_flops.costs.cluster) == ("l40s", None)
    assert asked.costs.transfer > 0
    assert found(asked).orders != found(of_flops).orders
    assert table_of(named, 12, costing).orders == found(asked).orders
    with pytest.raises(ValueError, match=r"run\.cluster"):
        wanted(named, 12)
    with pytest.raises(InputError, match=r"run\.cluster = nowhere"):
        costing_of(replace(free, run=replace(free.run, cluster="nowhere")))


def test_each_size_of_a_growing_batch_has_an_order_of_these_times() -> None:
    config, costing = configured("batch.rampup={start: 4, tokens: 100000}"), Timer(L40S).costs
    for m in (4, 12):
        table = table_of(config, m, costing)
        assert (table.micro_batches, table.times) == (m, tuple(stage.times for stage in costing(config).stages))


def test_the_bubble_counts_what_the_order_is_searched_for() -> None:
    config = configured()
    assert bubble(config) == pytest.approx(float(simulate(table_of(config)).bubble))
    asked = wanted(config, 12, Timer(SLOW).costs)
    table = table_of(config, 12, Timer(SLOW).costs)
    within = float(simulate(table, transfer=asked.costs.transfer).bubble)
    assert bubble(config, Timer(SLOW).costs) == idle(asked) == pytest.approx(within)
    assert within > float(simulate(table).bubble)
