"""Memory counted in dry runs, beside real tensors and beside the prediction."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from four_bits import skip_if_refused
from memory_cases import CASES, DOCUMENTS, SIZES, configured
from toy_jobs import make, one_rank

from megalite.commands.verify import random_batch
from megalite.dry_run.configuration import as_counted
from megalite.dry_run.run import copied_from_host, count_step, dry_job, dry_run, main
from megalite.plan.memory.held import FILES, HOST_MEMORY, OUTSIDE_KINDS
from megalite.plan.memory.peak import KINDS, enough_micro_batches, rank_memory
from megalite.plan.resolved import resolve
from megalite.plan.state_streams import BUCKET_BYTES, FILE_SLOTS
from megalite.train import build

TOLERANCE = 0.01


def device_total(found: dict[str, int]) -> int:
    return sum(size for kind, size in found.items() if kind not in OUTSIDE_KINDS)


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_a_dry_run_counts(name: str) -> None:
    overrides, pp = CASES[name]
    config = configured(overrides)
    skip_if_refused(config)
    predicted, counted = rank_memory(config, pp), dry_run(config, pp).bytes
    if torch.__version__ < (2, 12) and config.adapter is not None:  # FSDP2 then keeps what it reduced last
        assert predicted.total < device_total(counted)
        return
    assert predicted.total == pytest.approx(device_total(counted), rel=TOLERANCE)
    assert counted.keys() <= {*KINDS, *OUTSIDE_KINDS}
    for kind in ("parameters", "optimizer states", *OUTSIDE_KINDS):
        assert sum(predicted.of(kind).values()) == pytest.approx(counted.get(kind, 0), rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"train.precision": "fp32", "batch.micro": 2},
        {"train.recompute": "selective"},
        {"train.offload_activations": True, "optim.placement": "host", "optim.update_on": "host"},
        {**DOCUMENTS, "data.end_of_document": 0, "batch.micro": 2},
    ],
    ids=["fp32", "bf16, selective", "offloaded", "documents"],
)
def test_a_dry_run_counts_what_real_tensors_take(
    overrides: dict[str, object], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of gradients as a CPU makes them, which rounds what it adds to those of copies."""
    for module in ("megalite.parallel.product", "megalite.model.decoder", "megalite_kernels.products"):
        monkeypatch.setattr(sys.modules[module], "has_gpu_products", lambda total: False)
    sizes = {"batch.global": 2, "model.sequence_length": 128, "model.vocab_size": 512, "parallel.data.mode": mode}
    config = configured({**sizes, **overrides})
    dry = dry_run(config, 0).bytes
    with one_rank():
        job = make(config)
        assert count_step(job, random_batch(job, 0))[0] == dry


def test_a_whole_backward_between_the_halves_of_another(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("name: a\nmicro_batches: 3\nplacement: [0]\nranks: [F0.0 F0.1 F0.2 I0.0 B0.1 W0.0 B0.2]\n")
    mixed = {"parallel.pipeline.schedule": path, "parallel.data.mode": "zero2", "parallel.dp_shard": 2}
    config = configured({**mixed, "batch.global": 6})
    assert rank_memory(config, 0).total == pytest.approx(device_total(dry_run(config, 0).bytes), rel=TOLERANCE)


def test_optimizer_states_on_the_host_are_predicted_to_the_byte() -> None:
    """For the prediction, counts of updates take nothing: 4 bytes for each parameter of AdamW, and one flag to skip."""
    config = configured(CASES["muon, optimizer offloaded"][0])
    counted = dry_run(config, 0).bytes
    counts = 4 * (3 + 2 * SIZES["layers"])  # embedding, head, and norms
    assert sum(rank_memory(config, 0).of(HOST_MEMORY).values()) == counted[HOST_MEMORY] - counts
    assert "optimizer states" not in counted


def test_states_in_files_take_no_memory_but_their_slots() -> None:
    overrides, pp = CASES["optimizer in files"]
    here, there = (
        dry_run(configured({**overrides, "optim.placement": place}), pp).bytes for place in ("device", "./x")
    )
    states = here["optimizer states"]
    assert there[FILES] == pytest.approx(2 * states, rel=1e-3), "and the copy of checkpoint.async"
    assert "optimizer states" not in there
    slots = there[HOST_MEMORY] - (here[HOST_MEMORY] - states)
    assert slots == pytest.approx((FILE_SLOTS + 1) * BUCKET_BYTES, rel=1e-3), "one more is read by a save"


def test_shards_on_the_host_are_copied_before_they_are_gathered() -> None:
    plan = resolve(as_counted(configured(CASES["base on the host, zero3"][0])))
    with dry_job(plan, 0) as (job, _):
        job.stages[0]._get_fsdp_state()._lazy_init()
        layer = job.stages[0].layers["0"]
        params = layer._get_fsdp_state()._fsdp_param_group.fsdp_params
        assert {param.offload_to_cpu for param in params} == {True, False}
        for param in params:
            shard = param._sharded_param_data
            (gathered,) = copied_from_host(param)
            casts = gathered.dtype != shard.dtype
            copied = gathered.untyped_storage()._cdata != shard.untyped_storage()._cdata
            assert copied is (param.offload_to_cpu or casts)
            assert param._sharded_param_data is shard


def test_no_initial_values_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have no data, and filling takes a dozen operations for every expert."""
    monkeypatch.setattr(build, "initialize", Mock(side_effect=AssertionError))
    assert dry_run(configured({"model.layers": 1}), 0).bytes


def test_a_few_micro_batches_stand_for_many() -> None:
    config = configured({"parallel.pp": 2, "parallel.data.mode": "zero1", "parallel.dp_shard": 2, "batch.global": 32})
    few = enough_micro_batches(resolve(config), 0, 16)
    assert few < 16

    def counted(micro_batches: int) -> int:
        return device_total(dry_run(replace(config, batch=replace(config.batch, global_=2 * micro_batches)), 0).bytes)

    inputs = 8 * (3 * SIZES["sequence_length"] + 1)  # of a micro-batch: its sample, and tokens and targets made of it
    assert device_total(dry_run(config, 0).bytes) == pytest.approx(counted(few) + (16 - few) * inputs, abs=64)
    assert counted(1) < counted(few)


def test_a_rank_of_a_large_job_is_counted_on_its_own() -> None:
    sizes = {"model.width": 2048, "model.heads": 16, "model.ffn": 5504, "model.sequence_length": 4096}
    layout = {"parallel.tp": 4, "parallel.dp_shard": 64, "parallel.pp": 2, "batch.global": 256}
    config = configured({**sizes, **layout, "train.recompute": "full"})
    assert rank_memory(config, 1).total == pytest.approx(device_total(dry_run(config, 1).bytes), rel=TOLERANCE)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    assert main(["--pp=1", "--world-size=4", "parallel.pp=2", *sizes]) == 0
    assert (
        json.loads(capsys.readouterr().out)["bytes"]
        == dry_run(configured({"parallel.pp": 2, "parallel.dp_shard": 2}), 1).bytes
    )


def test_bad_input_is_told_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pp=0", "model.heads=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "model.heads = 3" in captured.err


@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_long_sequences_run_in_parts_and_without_masks(method: str) -> None:
    """128K tokens on 8 ranks: a mask of booleans would take 16 GiB, a rank's rows of it 2 GiB."""
    layout = {"parallel.cp": 8, "parallel.context.method": method, "train.recompute": "full", "batch.global": 1}
    documents = {"data.mask_documents": True, "data.end_of_document": 0}
    counted = dry_run(configured({"model.sequence_length": 131_072, **layout, **documents}), 0).bytes
    assert device_total(counted) < 1 << 30
