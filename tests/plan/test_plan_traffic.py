"""Predicted transfers: what must hold of them. How exact they are, tests/dry_run/test_counted.py tells."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic_cases import CASES, FULL, MUON, SELECTIVE, TP, Overrides, configured, context, data, pipeline

from megalite.plan.muon import working_bytes
from megalite.plan.parts.transfers import Traffic, axis_sizes, stage_axis
from megalite.plan.parts.window import halo, halo_messages
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic
from megalite.plan.traffic.weights import Gathering, WeightTraffic


def traffic(overrides: Overrides, rank: int = 0, m: int | None = None) -> list[Traffic]:
    config = configured(overrides)
    return step_traffic(resolve(config), rank, m or micro_batches(config))


def total(found: list[Traffic], axis: str, kind: str = "") -> int:
    return sum(each.total for each in found if each.axis == axis and kind in ("", each.kind))


@given(st.integers(2, 8), st.integers(1, 6), st.data())
def test_messages_of_a_halo_add_up(cp: int, chunk: int, choice: st.DataObject) -> None:
    length = 2 * cp * chunk
    window = choice.draw(st.integers(1, length - 1))
    sent, received = zip(*(halo_messages(cp, rank, length, window) for rank in range(cp)), strict=True)
    assert [(sum(s), sum(r)) for s, r in zip(sent, received, strict=True)] == [
        halo(cp, rank, length, window) for rank in range(cp)
    ]
    assert sorted(positions for each in sent for positions in each) == sorted(x for each in received for x in each)
    assert all(0 < positions <= 2 * chunk for each in sent for positions in each)


@pytest.mark.parametrize("name", CASES)
def test_axes_are_named_and_used_only_where_there_are_other_ranks(name: str) -> None:
    overrides, coordinates = CASES[name]
    config = configured(overrides)
    found = step_traffic(resolve(config), config.parallel.layout.rank(**coordinates), micro_batches(config))
    sizes = axis_sizes(config)
    assert all(each.ranks == sizes[each.axis] and each.times > 0 for each in found)
    assert {each.axis for each in found if each.ranks == 1} <= {"world"}
    assert {"tp", "cp", "fsdp", "pp"} & {each.axis for each in found} >= {
        axis for axis in ("tp", "cp", "fsdp") if sizes[axis] > 1 and overrides.get("model.attention.window") != 1
    }
    assert all(": " in each.purpose for each in found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_what_a_rank_sends_another_receives(schedule: str) -> None:
    found = [traffic({**pipeline(schedule), "model.tie_embeddings": True}, rank) for rank in range(2)]
    for kind, other in (("send", "receive"), ("receive", "send")):
        assert total(found[0], "pp", kind) == total(found[1], "pp", other) > 0


def test_every_micro_batch_adds_the_same() -> None:
    found = [Counter({e.transfer: e.times for e in traffic({**TP, **FULL}, m=m)}) for m in (2, 3, 4)]
    assert found[2] - found[1] == found[1] - found[0]


def test_selective_recompute_sends_nothing_again_and_full_does() -> None:
    plain, selective, full = (total(traffic({**TP, **how}), "tp") for how in ({}, SELECTIVE, FULL))
    assert plain == selective < full


def test_a_window_that_reaches_everything_is_none() -> None:
    def keys(window: int | None) -> int:
        return total(traffic({**context("ring", 4), "model.attention.window": window or "null"}), "cp")

    assert keys(64) == keys(None) > keys(32) > keys(8) > 0


def test_modes_gather_and_reduce_as_often_as_they_say() -> None:
    def times(mode: str, kind: str) -> int:
        found = traffic(data(mode, dp_shard=2), m=4)
        return sum(each.times for each in found if (each.axis, each.kind) == ("fsdp", kind))

    groups = 4  # the embedding, two layers and the head
    assert (times("zero1", "all_gather"), times("zero1", "reduce_scatter")) == (groups, groups)
    assert (times("zero2", "all_gather"), times("zero2", "reduce_scatter")) == (groups, 4 * groups)
    assert times("zero3", "reduce_scatter") == 4 * groups
    assert times("zero3", "all_gather") == 2 * 4 * groups


def test_a_group_that_stays_with_its_stage_is_gathered_again_after_backward() -> None:
    tied, *others = groups = WeightTraffic(resolve(configured({"model.tie_embeddings": True})), 0).groups
    gathering = Gathering(groups)
    assert tied.with_stage
    assert [gathering.forward(), gathering.forward(), gathering.backward()] == [groups, others, others]
    assert [gathering.backward(), gathering.forward()] == [groups, groups]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]), st.booleans())
def test_the_ranks_of_a_stage_have_one_axis(pp: int, shard: int, replicate: int, tp: int, sharded: bool) -> None:
    mode = "zero1" if sharded else "ddp"
    config = configured({"parallel.pp": pp, "parallel.tp": tp, **data(mode, dp_shard=shard, dp_replicate=replicate)})
    axis, sizes = stage_axis(config), axis_sizes(config)
    if config.parallel.layout.world_size > pp:
        assert sizes[axis] == shard * replicate * tp
    assert (axis == "world") == (pp == 1)


def test_muon_sends_half_as_much_on_a_gpu() -> None:
    config = configured({**MUON, **data("zero2", dp_shard=2)})
    on_gpu = replace(config, run=replace(config.run, device="cuda"))
    sent = [total(step_traffic(resolve(each), 0, 2), "world", "all_to_all") for each in (config, on_gpu)]
    assert sent[0] == 2 * sent[1] > 0
    assert [working_bytes(each) for each in (config, on_gpu)] == [4, 2]
