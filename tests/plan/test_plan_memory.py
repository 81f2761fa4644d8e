"""Predicted memory: what must hold of it in every configuration. tests/dry_run/test_dryrun.py tells how exact it is."""

from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_cases import CASES, PIPELINE, POST, SHARDED, Overrides, configured

from megalite.base.errors import InputError
from megalite.config.layers import layer_kinds
from megalite.config.schema import Batch, Config, Rampup
from megalite.plan import repeated_layers
from megalite.plan.activations import ROWS, Activations, chunk_tokens
from megalite.plan.batches import batch_sizes
from megalite.plan.memory import walk
from megalite.plan.memory.held import HOST_MEMORY, OUTSIDE_KINDS
from megalite.plan.memory.peak import KINDS, enough_micro_batches, rank_memory
from megalite.plan.model.size import model_parameters, stage_parameters
from megalite.plan.muon import step_temporaries
from megalite.plan.pipeline import table_of
from megalite.plan.resolved import resolve
from megalite.plan.split import split_of
from megalite.plan.units import Unit
from megalite.schedule.simulate import simulate

WITH_COPY = 4 + 2  # bytes of a parameter, and of the copy with which a single data-parallel rank computes in bf16


def a_layer(config: Config) -> Unit:
    """One that recomputes nothing."""
    return Activations(config).layer(layer_kinds(config.model)[0], "none")


def of(overrides: Overrides, kind: str, pp: int = 0) -> int:
    return sum(rank_memory(configured(overrides), pp).of(kind).values())


def total(overrides: Overrides, pp: int = 0) -> int:
    return rank_memory(configured(overrides), pp).total


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_states_of_one_rank_are_those_of_the_model(precision: str, tied: bool) -> None:
    overrides = {"train.precision": precision, "model.tie_embeddings": tied}
    count, each = model_parameters(configured(overrides).model).total, 8 if precision == "fp64" else 4
    assert of(overrides, "parameters") == (each + 2 * (precision == "bf16")) * count
    assert of(overrides, "optimizer states") == 2 * each * count


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_pipeline_ranks_are_those_of_their_stages(tied: bool) -> None:
    overrides = {**PIPELINE, "model.tie_embeddings": tied}
    config = configured(overrides)
    for pp, stage in enumerate(stage_parameters(config.model, split_of(config))):
        assert of(overrides, "parameters", pp) == WITH_COPY * stage.total


def test_tensor_parallel_ranks_share_out_all_but_the_norms() -> None:
    memory = rank_memory(configured({"parallel.tp": 4}), 0).of("parameters")
    whole = model_parameters(configured({}).model)
    assert memory == {name: WITH_COPY * getattr(whole, name) // (1 if name == "norms" else 4) for name in memory}


def test_tensor_parallelism_shares_out_norms_of_all_heads() -> None:
    config = configured({**POST, "parallel.tp": 4})
    model, found = config.model, rank_memory(config, 0).of("parameters")["norms"]
    heads = (model.heads + model.kv_heads) * model.head_size // 4
    assert found == WITH_COPY * (model.layers * (2 * model.width + heads) + model.width)


def test_data_modes_hold_ever_less() -> None:
    # Enough micro-batches for gradients to pile up, and few tokens, so that weights and gradients decide.
    small = {"model.sequence_length": 64, "batch.global": 32, "parallel.dp_shard": 4}
    totals = [total({**small, "parallel.data.mode": mode}) for mode in ("ddp", "zero1", "zero2", "zero3")]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_replicas_share_out_nothing() -> None:
    both = {"parallel.dp_shard": 2, "parallel.dp_replicate": 2}
    assert of(both, "parameters") == of({"parallel.dp_shard": 2}, "parameters")


def test_recompute_keeps_ever_less() -> None:
    modes = ({"train.recompute": mode} for mode in ("none", "selective", "full"))
    kept = [of({**mode, "batch.micro": 4, "model.layers": 8}, "activations") for mode in modes]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[1] > kept[2]
    every = {"train.recompute": "full", "train.recompute_every": 2, "batch.micro": 4, "model.layers": 8}
    assert kept[0] > of(every, "activations") > kept[2]


@settings(deadline=None, max_examples=20)
@given(st.floats(0.04, 0.2))
def test_a_budget_is_kept(budget: float) -> None:
    config = configured({"train.recompute": "budget", "train.recompute_budget": budget, "batch.micro": 4})
    plan = resolve(config)
    outside = sum(Activations(config).outside(stages=1).values())
    assert outside > 2**20
    assert outside + sum(Activations(config).layer_bytes(*layer) for layer in plan.recomputed(0)) <= budget * 2**30


def test_what_embedding_and_head_keep_leaves_less_of_a_budget() -> None:
    wide = {"model.vocab_size": 32768, "model.sequence_length": 2048, "train.recompute": "budget"}
    config = configured({**wide, "train.recompute_budget": 0.2})
    kept = rank_memory(config, 0).of("activations")
    assert sum(kept.values()) - kept["inputs"] <= 0.2 * 2**30
    with pytest.raises(
        InputError,
        match=r"train\.recompute_budget = 0\.05: the activations of a rank take 1\d\d MiB .*use at least 0\.1\d\d?,",
    ):
        rank_memory(configured({**wide, "train.recompute_budget": 0.05}), 0)


def test_a_budget_that_nothing_fits_is_refused() -> None:
    config = configured({"train.recompute": "budget", "train.recompute_budget": 0.0001})
    with pytest.raises(InputError, match=r"train\.recompute_budget"):
        rank_memory(config, 0)


def test_a_table_is_made_once() -> None:
    """It takes seconds for large pipelines, and every command asks several times; a file may change in between."""
    first, again = (table_of(configured({**PIPELINE, "parallel.data.mode": "zero2"})) for _ in range(2))
    assert first is again


def test_offloading_moves_bytes_to_the_host() -> None:
    at_once = {"checkpoint.async": False}
    for moved in ({"train.offload_activations": True}, {"optim.placement": "host", "optim.update_on": "host"}):
        assert of({**moved, **at_once}, HOST_MEMORY) > 0
        assert total({**moved, **at_once}) < total({})
    assert of({"optim.placement": "host"}, "optimizer states") == 0
    assert rank_memory(configured(at_once), 0).of(HOST_MEMORY) == {}


def test_fp32_on_cuda_keeps_keys_and_values_of_every_query_head() -> None:
    def kept(device: str, **model: object) -> int:
        config = configured({"train.precision": "fp32", "run.device": device, **model})
        return sum(part.bytes for part in a_layer(config).kept)

    model = configured({}).model
    assert model.kv_heads < model.heads
    more = 2 * (model.heads - model.kv_heads) * model.head_size * 4 * Activations(configured({})).tokens
    assert kept("cuda") - kept("cpu") == more
    equal = {"model.kv_heads": model.heads}
    assert kept("cuda", **equal) == kept("cpu", **equal)


def test_the_loss_handles_as_many_rows_at_a_time_as_planned() -> None:
    """The planner imports no torch, and kernels import nothing of megalite: each has its own number."""
    assert import_module("megalite_kernels.cross_entropy").ROWS == ROWS


@given(
    st.integers(0, 100_000),
    st.integers(1, 20_000),
    st.integers(1, 200_000),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 8),
)
def test_the_head_makes_as_many_logits_at_a_time_as_planned(
    tokens: int, width: int, columns: int, dtype: torch.dtype, ranks: int
) -> None:
    kernels = import_module("megalite_kernels.linear_cross_entropy")
    planned = chunk_tokens(tokens, width, dtype.itemsize, ranks)
    assert kernels.chunk_tokens(tokens, width, columns, dtype, ranks) == planned


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_1f1b", "zb_h2", "zbv"]),
    st.integers(2, 3),
    st.integers(1, 4),
    st.integers(4, 14),
    st.sampled_from(["zero1", "zero2"]),
)
def test_the_fullest_step_of_a_ramp_counts(schedule: str, pp: int, start: int, full: int, mode: str) -> None:
    pipeline = {"parallel.pp": pp, "parallel.pipeline.schedule": schedule, "parallel.data.mode": mode}
    if schedule == "interleaved_1f1b":
        pipeline["parallel.pipeline.virtual_stages"] = 3
    config = configured({"model.layers": 9, **pipeline, **SHARDED, "batch.global": 2 * full})
    config = replace(config, batch=replace(config.batch, rampup=Rampup(2 * start, 2, 100)))
    steps = [replace(config, batch=Batch(1, size)) for size in batch_sizes(config)]
    assert rank_memory(config, 0).total == max(rank_memory(step, 0).total for step in steps)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_comes_on_top_of_what_graphs_keep(optimizer: str) -> None:
    config = configured({"optim.name": optimizer, "model.sequence_length": 2048})
    plain, graphed = (
        rank_memory(replace(config, train=replace(config.train, cuda_graph=each)), 0) for each in (False, True)
    )
    of_update = step_temporaries(resolve(config), 0)
    assert graphed.total == plain.total + of_update + Activations(config).inputs
    assert (of_update > 0) == (f"{graphed.instant}" == "update of the weights") == (optimizer == "muon")


def test_a_smaller_batch_may_hold_more() -> None:
    interleaved = {"parallel.pipeline.schedule": "interleaved_1f1b", "parallel.pipeline.virtual_stages": 4}
    long = {"model.layers": 8, "parallel.pp": 2, "batch.global": 8, "model.sequence_length": 2048}
    grown = configured({**interleaved, **long})
    growing = replace(grown, batch=replace(grown.batch, rampup=Rampup(5, 1, 100)))
    small, large = rank_memory(growing, 0), rank_memory(grown, 0)
    assert (small.micro_batches, large.micro_batches) == (7, 8)
    assert small.total > 1.2 * large.total


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("pp", [0, 1])
def test_as_many_micro_batches_are_held_as_the_simulation_says(schedule: str, pp: int) -> None:
    long = {"model.sequence_length": 8192}  # so that the peak is where most activations are held
    config = configured({**PIPELINE, **long, "parallel.pipeline.schedule": schedule})
    table = table_of(config)
    held = simulate(table).peak_live[pp] * 4 // table.stages  # layers
    one = sum(kept.bytes for kept in a_layer(config).kept if kept.component == "mlp")
    assert (held - 1) * one < rank_memory(config, pp).of("activations")["mlp"] <= held * one


@pytest.mark.parametrize("overrides", [{"parallel.tp": 4, **SHARDED}, {"parallel.tp": 4, "model.tie_embeddings": True}])
def test_the_padding_of_a_vocabulary_takes_memory(overrides: Overrides) -> None:
    padded, whole = (rank_memory(configured({**overrides, "model.vocab_size": size}), 0) for size in (4001, 4096))
    assert padded.bytes == whole.bytes


@pytest.mark.parametrize("name", CASES)
def test_components_are_named_and_add_up(name: str) -> None:
    overrides, pp = CASES[name]
    memory = rank_memory(configured(overrides), pp)
    assert {kind for kind, _ in memory.bytes} <= {*KINDS, *OUTSIDE_KINDS}
    assert min(memory.bytes.values()) > 0
    outside = sum(sum(memory.of(kind).values()) for kind in OUTSIDE_KINDS)
    assert memory.total + outside == sum(memory.bytes.values())
    assert all(component and component != kind for kind, component in memory.bytes)


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_few_micro_batches_are_enough_to_reach_the_peak(mode: str) -> None:
    config = configured({**PIPELINE, **SHARDED, "parallel.data.mode": mode, "batch.global": 64})
    assert 1 < enough_micro_batches(resolve(config), 0, 32) <= 8
    assert enough_micro_batches(resolve(configured({"batch.global": 1})), 0, 1) == 1


def test_a_longer_sequence_takes_more_of_what_depends_on_it() -> None:
    short, long = (rank_memory(configured({"model.sequence_length": length}), 0) for length in (2048, 4096))
    assert sum(long.of("activations").values()) == pytest.approx(2 * sum(short.of("activations").values()), rel=0.01)
    assert long.of("parameters") == short.of("parameters")


LARGE = st.fixed_dictionaries(
    {
        "parallel.pipeline.schedule": st.sampled_from(
            ["gpipe", "1f1b", "interleaved_1f1b", "zb_h2", "zbv", "dualpipev"]
        ),
        "parallel.data.mode": st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
        "parallel.dp_shard": st.integers(1, 3),
        "train.recompute": st.sampled_from(["none", "selective", "full"]),
        "train.offload_activations": st.booleans(),
        "model.tie_embeddings": st.booleans(),
        "model.sequence_length": st.sampled_from([16, 512]),
        "parallel.pp": st.integers(1, 3),
    }
)


@settings(deadline=None, max_examples=15)
@given(LARGE, st.integers(12, 30), st.integers(1, 4), st.data())
def test_many_layers_alike_are_walked_as_one(large: Overrides, layers: int, every: int, data: st.DataObject) -> None:
    every = 1 if large["train.recompute"] == "none" else every
    config = configured({**large, "model.layers": layers, "train.recompute_every": every, "batch.global": 24})
    pp = data.draw(st.integers(0, config.parallel.pp - 1))
    found = rank_memory(config, pp)
    with patch.object(repeated_layers, "condensed", lambda modes: [(mode, 1) for mode in modes]):
        assert rank_memory(config, pp) == found


@settings(deadline=None, max_examples=15)
@given(LARGE, st.integers(1, 60), st.data())
def test_few_micro_batches_are_walked_for_many(large: Overrides, m: int, data: st.DataObject) -> None:
    config = configured({**large, "model.layers": 6, "batch.global": 6 * m})
    pp, full = data.draw(st.integers(0, config.parallel.pp - 1)), 6 * m // config.parallel.dp_shard
    assume(full >= config.parallel.pp)
    held = walk.Walk(resolve(config), full, pp).run()
    inputs = {("activations", "inputs"): full * Activations(config).inputs}
    assert rank_memory(config, pp).bytes == {**held, **inputs}


def test_modes_that_repeat_are_condensed_and_none_is_lost() -> None:
    assert repeated_layers.condensed([]) == []
    assert repeated_layers.condensed(["none"] * 4) == [("none", 1)] * 4
    assert repeated_layers.condensed(["none"] * 9) == [("none", 1)] * 2 + [("none", 5)] + [("none", 1)] * 2
    assert len(repeated_layers.condensed(["full", "none", "none"] * 3000)) == 14
    assert sum(times for _, times in repeated_layers.condensed([*["full"] * 31, *["none"] * 47])) == 78
