"""Megatron-LM's `torch_dist`, checked against folders that PyTorch has saved, and loaded again by PyTorch."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_files import MODELS, random_weights, read, same, write_dist
from torch.distributed.checkpoint import FileSystemReader

from megalite.checkpoint.convert import convert
from megalite.checkpoint.formats import torch_dist
from megalite.checkpoint.maps.megatron import Split
from megalite.config.schema import Model


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "layer by layer"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_both_kinds_of_layers_are_read(model: Model, stacked: bool, tmp_path: Path) -> None:
    ours = random_weights(model)
    write_dist(tmp_path, model, ours, stacked=stacked)
    found = torch_dist.open_folder(tmp_path)
    assert found.model == model
    assert same(read(found), ours)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
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
