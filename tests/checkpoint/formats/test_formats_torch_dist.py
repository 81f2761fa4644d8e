"""Megatron-LM's `torch_dist`, checked against folders that PyTorch has saved, and loaded again by PyTorch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_files import MIXED, MODELS, SMALL, dist_tensors, random_weights, read, same, trained, write_dist
from torch.distributed.checkpoint import FileSystemReader

from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import torch_dist
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.config.model_schema import Model

ALL = MODELS | MIXED


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "layer by layer"])
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_both_kinds_of_layers_are_read(model: Model, stacked: bool, tmp_path: Path) -> None:
    ours = random_weights(model)
    write_dist(tmp_path, model, ours, stacked=stacked)
    found = torch_dist.open_folder(tmp_path)
    assert found.model == model
    assert same(read(found), ours)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_pytorch_loads_what_is_written(model: Model, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 20_000)  # so that there are several files
    ours = random_weights(model)
    write_dist(tmp_path / "theirs", model, ours)
    write_dist(tmp_path / "expected", model, ours, tp)
    found = torch_dist.open_folder(tmp_path / "theirs")
    convert(found, torch_dist.plan(found, Split(tp, 2, 2)), tmp_path / "to", {})
    one, two = (next(path.parent for path in tmp_path.glob(f"{name}/*/.metadata")) for name in ("to", "expected"))
    assert len(list(one.glob("*.distcp"))) > 3
    wanted = {
        name: torch.zeros(kind.size, dtype=kind.properties.dtype)
        for name, kind in FileSystemReader(two).read_metadata().state_dict_metadata.items()
        if hasattr(kind, "size")
    }
    loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(wanted, checkpoint_id=two, no_dist=True)
    dcp.load(loaded, checkpoint_id=one, no_dist=True)
    assert same(loaded, wanted)
    assert same(read(torch_dist.open_folder(tmp_path / "to")), ours)


@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_states_of_the_optimizer_are_read(model: Model, tmp_path: Path) -> None:
    kinds = {"fp32_param": "model.", "exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
    states = {
        kind: {name: tensor + number for name, tensor in trained(random_weights(model)).items()}
        for number, kind in enumerate(kinds)
    }
    more = {
        f"optimizer.state.{kind}.{name}": tensor
        for kind, ours in states.items()
        for name, tensor in dist_tensors(model, ours).items()
    }
    write_dist(tmp_path, model, random_weights(model, torch.bfloat16), **more)
    found = torch_dist.open_folder(tmp_path, states=True)
    expected = {prefix + name: tensor for kind, prefix in kinds.items() for name, tensor in states[kind].items()}
    expected = {f"model.{name}": tensor for name, tensor in random_weights(model).items()} | expected
    assert same(
        {f"model.{name}".replace("model.optimizer", "optimizer"): tensor for name, tensor in read(found).items()},
        expected,
    )
    assert same(read(torch_dist.open_folder(tmp_path)), random_weights(model, torch.bfloat16))
    assert found.training is not None
    progress = found.training.progress
    assert (progress.step, progress.updates, progress.samples, progress.tokens) == (10, 10, 640, 640 * 32)


def test_a_state_that_is_missing_is_told(tmp_path: Path) -> None:
    kinds = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    more = {
        f"{kinds[0]}output_layer.weight": torch.zeros(384, 16),
        f"{kinds[1]}output_layer.weight": torch.zeros(384, 16),
    }
    write_dist(tmp_path, SMALL, random_weights(SMALL), **more)
    with pytest.raises(DamagedError, match=r"lacks optimizer\.state\.exp_avg\.decoder\.final_layernorm\.weight"):
        torch_dist.open_folder(tmp_path, states=True)


def test_a_state_of_another_shape_is_told_by_its_name(tmp_path: Path) -> None:
    states = {kind: dist_tensors(SMALL, random_weights(SMALL)) for kind in ("exp_avg", "exp_avg_sq")}
    states["exp_avg_sq"]["decoder.layers.mlp.linear_fc2.weight"] = torch.zeros(4, 16, 23)
    more = {f"optimizer.state.{kind}.{name}": value for kind, ours in states.items() for name, value in ours.items()}
    write_dist(tmp_path, SMALL, random_weights(SMALL), **more)
    with pytest.raises(
        DamagedError, match=r"has optimizer\.state\.exp_avg_sq\.decoder\.layers\.mlp\.linear_fc2\.weight \["
    ):
        torch_dist.open_folder(tmp_path, states=True)


@pytest.mark.parametrize("name", ["experts", "experts in some layers"])
def test_the_norm_before_experts_has_the_names_of_both_kinds_of_modules(name: str, tmp_path: Path) -> None:
    """With Transformer Engine it has its own, without one that of a norm before a plain feed-forward."""
    model = MIXED[name]
    ours = random_weights(model)
    write_dist(tmp_path / "theirs", model, ours)
    found = torch_dist.open_folder(tmp_path / "theirs")
    convert(found, torch_dist.plan(found), tmp_path / "to", {})
    layer, norms = ("", torch.stack([ours[f"layers.{number}.mlp_norm.weight"] for number in range(4)]))
    if name != "experts":
        layer, norms = "1.", norms[1]
    loaded = {
        f"decoder.layers.{layer}{each}": torch.zeros_like(norms)
        for each in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "to" / "release", no_dist=True)
    assert all(torch.equal(tensor, norms) for tensor in loaded.values())


def test_each_expert_is_a_part_of_its_own(tmp_path: Path) -> None:
    """So that a rank which has some of them reads no others."""
    model = MIXED["experts"]
    write_dist(tmp_path / "theirs", model, random_weights(model))
    found = torch_dist.open_folder(tmp_path / "theirs")
    convert(found, torch_dist.plan(found), tmp_path / "to", {})
    kinds = FileSystemReader(tmp_path / "to" / "release").read_metadata().state_dict_metadata
    parts = kinds["decoder.layers.mlp.experts.experts.linear_fc1.weight"].chunks
    assert {tuple(part.sizes) for part in parts} == {(1, 1, 16, 16)}
    assert len(parts) == 4 * 6


def test_more_experts_than_there_are_is_told_at_once(tmp_path: Path) -> None:
    model = MIXED["experts"]
    write_dist(tmp_path, model, random_weights(model))
    for count, told in ((10**9, r"has \[4, 6, 16, 16\] of experts in a tensor instead of 1,000,000,000"), (5, "6, 16")):
        with pytest.raises(DamagedError, match=told):
            torch_dist.open_folder(tmp_path, replace(model, experts=replace(model.experts, count=count)))
