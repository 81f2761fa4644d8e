"""What `parallel.pipeline.schedule: auto` searches an order for."""

import re

import pytest

from megalite.base.errors import InputError
from megalite.config.layers import layer_kinds
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.config.yaml import parse
from megalite.plan.activations import Activations
from megalite.plan.automatic import GRAIN, as_tight, costs_of, found, limit_of, wanted
from megalite.plan.memory.fit import fitted
from megalite.plan.memory.peak import memory_of_ranks
from megalite.plan.model.size import head_forward_flops, layer_forward_flops
from megalite.plan.pipeline import fullest_steps, placement, table_of
from megalite.plan.split import split_of
from megalite.schedule.file import complete, write
from megalite.schedule.search import memory_of

GIB = 1 << 30


def configured(*overrides: str) -> Config:
    small = ["model.layers=6", "model.vocab_size=4096", "parallel.pp=3", "batch.global=6"]
    return check(load([], [*small, "parallel.pipeline.schedule=auto", *overrides]))


def test_times_are_those_of_flops() -> None:
    config = configured("parallel.pipeline.split=[2,2,2]", "train.recompute=full")
    layer, head = layer_forward_flops(config.model, layer_kinds(config.model)[0]), head_forward_flops(config.model)
    first, _, last = costs_of(config)
    assert (last.forward / first.forward) == pytest.approx((2 * layer + head) / (2 * layer), abs=2 / GRAIN)
    whole = 3 * 2 * layer + 2 * layer  # of the two layers, forward once more included
    assert (first.forward + first.backward) / first.forward == pytest.approx(whole / (2 * layer), abs=5 / GRAIN)
    assert (last.backward - first.backward) / first.forward == pytest.approx(2 * head / (2 * layer), abs=5 / GRAIN)
    assert last.weight == first.weight, "the head makes the gradient of its weight in I"
    assert {stage.backward for stage in costs_of(config)} == {s.input + s.weight for s in costs_of(config)}


def test_gradients_of_weights_take_next_to_nothing_beside_adapters() -> None:
    whole, adapted = (
        costs_of(configured("model.width=512", "parallel.pipeline.split=[2,2,2]", *keys))
        for keys in ([], ["adapter.rank=4"])
    )
    for one, other in zip(whole, adapted, strict=True):
        assert other.forward == pytest.approx(one.forward, rel=0.05)
        assert 0 < other.weight < 0.03 * one.weight
        assert other.backward == other.input + other.weight < 0.7 * one.backward


def test_a_head_in_chunks_does_all_of_its_work_forward() -> None:
    config = configured("parallel.pipeline.split=[3,3,0]", "model.sequence_length=8192")
    assert Activations(config).chunks_head
    last = costs_of(config)[-1]
    assert (last.backward, last.weight) == (1 / GRAIN, 0.0)


def test_memory_is_what_stages_keep() -> None:
    config = configured("parallel.pipeline.split=[2,2,2]")
    sizes, kind = Activations(config), layer_kinds(config.model)[0]
    first, middle, last = costs_of(config)
    assert middle.kept == 2 * sizes.layer_bytes(kind, "none")
    assert first.kept - middle.kept == sizes.outside(3)[0]
    assert last.kept - middle.kept == sizes.outside(3)[2]
    assert 0 < middle.waiting < middle.kept
    recomputed = costs_of(configured("parallel.pipeline.split=[2,2,2]", "train.recompute=full"))[1]
    assert recomputed.kept == 2 * sizes.layer_bytes(kind, "full") < recomputed.waiting


@pytest.mark.parametrize("overrides", [[], ["parallel.pp=2", "parallel.pipeline.virtual_stages=2"]])
def test_an_order_keeps_to_the_memory_of_1f1b_or_to_what_is_configured(overrides: list[str]) -> None:
    free = configured(*overrides)
    asked = wanted(free, 6)
    orders = found(asked).orders
    assert max(memory_of(orders, asked.placement, 6, asked.costs.stages)) <= limit_of(free, 6)
    half = limit_of(free, 6) / 2 / GIB
    tight = configured(*overrides, f"parallel.pipeline.memory={half}")
    tighter = found(wanted(tight, 6))
    assert max(memory_of(tighter.orders, asked.placement, 6, asked.costs.stages)) <= half * GIB
    assert tighter.makespan > found(asked).makespan


def test_as_much_as_1f1b_is_counted_by_its_fullest_rank() -> None:
    config = configured("parallel.pipeline.split=[2,2,2]")
    kept = [stage.kept for stage in costs_of(config)]
    assert limit_of(config, 6) == max(3 * kept[0], 2 * kept[1], kept[2])
    assert limit_of(config, 1) == max(kept)


def test_too_little_memory_is_told_with_the_key() -> None:
    with pytest.raises(InputError) as caught:
        table_of(configured("parallel.pipeline.memory=1e-6"))
    message = str(caught.value)
    assert "parallel.pipeline.memory = 1e-06: is less than the " in message
    assert "iB of activations of one micro-batch on pipeline rank " in message
    enough = re.search(r"use at least ([\d.]+),", message)
    assert enough is not None
    table_of(configured(f"parallel.pipeline.memory={enough[1]}"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.data.mode=zero1", "parallel.dp_shard=2"],
        ["parallel.data.mode=ddp", "parallel.dp_shard=2", "train.recompute=full"],
        ["parallel.pp=2", "parallel.pipeline.virtual_stages=2", "train.offload_activations=true"],
        ["train.recompute=budget", "train.recompute_budget=0.1"],
        ["train.compile=true"],
    ],
)
def test_memory_is_predicted_along_the_order(overrides: list[str]) -> None:
    config = configured(*overrides)
    memories = memory_of_ranks(config)
    assert [memory.pp for memory in memories] == list(range(config.parallel.pp))
    table = table_of(config)
    assert table is table_of(config), "searched once"
    assert table.placement == placement(config)
    assert not (config.train.compile and table.splits_backward)


def test_a_growing_batch_has_an_order_for_each_size() -> None:
    config = configured("batch.rampup={start: 2, tokens: 10000}")
    assert fullest_steps(config) == [2, 4, 6]
    for m in fullest_steps(config):
        assert table_of(config, m).micro_batches == m
    assert len(memory_of_ranks(config)) == 3


def test_a_micro_batch_is_fitted_along_orders() -> None:
    config = fitted(configured("batch.micro=auto", "batch.memory=1"))
    assert config.batch.micro == 2


def test_the_order_is_a_schedule_file_with_the_same_transfers() -> None:
    table = table_of(configured("train.precision=fp32"))
    assert complete(parse(write(table))) == table


def test_a_smaller_copy_is_limited_as_much() -> None:
    config = configured("parallel.pipeline.split=[2,2,2]")
    limit = limit_of(config, 6) / GIB
    small = configured("parallel.pipeline.split=[2,2,2]", "model.width=64", "batch.global=3")
    of_small = limit_of(small, 3) / GIB
    for share in (1.0, 0.8):
        config.parallel.pipeline.memory = share * limit
        assert as_tight(config, small) == pytest.approx(share * of_small)
    config.parallel.pipeline.memory = 1e-9
    assert as_tight(config, small) == max(stage.kept for stage in costs_of(small)) / GIB
    assert len(split_of(small)) == 3
