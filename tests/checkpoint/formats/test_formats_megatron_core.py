"""Megatron-Core itself, where it is installed, saves what we read and loads what we have written."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_files import MIXED, MODELS, Ours, dist_tensors, random_weights, read, same, stage, trained, write_dist
from torch import Tensor

from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import megatron, torch_dist
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder

pytest.importorskip("megatron.core")
TOKENS = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-5  # of logits, relative to the largest: float32 through four layers
PROGRAM, OPTIMIZER = (Path(__file__).with_name(f"megatron_core_{name}.py") for name in ("model", "optimizer"))
MOMENTS = ("exp_avg", "exp_avg_sq")
ALL = MODELS | MIXED


def run(action: str, folder: Path, logits: Path, case: str, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * pp}"]
    script(PROGRAM, action, folder, logits, case, tp, pp, ep, start=torchrun)


def script(program: Path, *arguments: object, start: Sequence[str] = (sys.executable,)) -> None:
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONWARNINGS": "ignore"}
    command = [*start, str(program), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def our_logits(model: Model, ours: Ours) -> Tensor:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        decoder = Decoder(model, mesh.tp, range(model.layers)).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.to_local().copy_(ours[name])
            for name, buffer in decoder.named_buffers():
                if name in ours:
                    buffer.to_local().copy_(ours[name])
            return decoder(TOKENS.T).transpose(0, 1).contiguous()
    finally:
        dist.destroy_process_group()


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", ALL)
def test_a_model_of_megatron_core_has_its_logits_here(case: str, tmp_path: Path) -> None:
    run("save", tmp_path / "saved", tmp_path / "logits", case)
    found = torch_dist.open_folder(tmp_path / "saved")
    model = ALL[case]
    assert found.model == model
    expected = torch.load(tmp_path / "logits")[..., : model.vocab_size]
    assert distance(our_logits(model, read(found)), expected) < TOLERANCE


@pytest.mark.parametrize("case", ALL)
def test_what_we_write_has_our_logits_in_megatron_core(case: str, tmp_path: Path) -> None:
    model = ALL[case]
    ours = {name: tensor * 0.1 + (1.0 if "norm" in name else 0.0) for name, tensor in random_weights(model).items()}
    write_dist(tmp_path / "from", model, ours)
    found = torch_dist.open_folder(tmp_path / "from")
    convert(found, torch_dist.plan(found), tmp_path / "to", {})
    run("load", tmp_path / "to" / "release", tmp_path / "logits", case)
    expected = torch.load(tmp_path / "logits")[..., : model.vocab_size]
    assert distance(our_logits(model, ours), expected) < TOLERANCE


@pytest.mark.parametrize("case", ["grouped", "head norms", "corrected experts in groups"])
def test_the_states_of_its_optimizer_are_read(case: str, tmp_path: Path) -> None:
    model = ALL[case]
    run("train", tmp_path / "saved", tmp_path / "states", case)
    found = read(torch_dist.open_folder(tmp_path / "saved", states=True))
    expected = torch.load(tmp_path / "states")
    for kind in ("exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.{kind}."
        ours = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        theirs = stage(model, ours, range(model.layers), local=True)
        assert expected.keys() == theirs.keys()
        for name, states in expected.items():
            rows = model.vocab_size if "embedding" in name or "output" in name else None
            assert torch.equal(theirs[name][:rows], states[kind][:rows])
    training = torch_dist.open_folder(tmp_path / "saved", states=True).training
    assert training is not None
    assert (training.progress.step, training.progress.updates, training.progress.samples) == (5, 1, 640)


@pytest.mark.parametrize("kind", ["fp32", "mixed", "distributed"])
@pytest.mark.parametrize("case", ["tied", "head norms", "experts", "corrected experts in groups"])
def test_its_optimizers_load_the_states_that_we_write(case: str, kind: str, tmp_path: Path) -> None:
    model, weights = ALL[case], random_weights(ALL[case])
    updated = trained(weights)
    states = {"param": updated, **{name: {key: tensor.abs() for key, tensor in updated.items()} for name in MOMENTS}}
    more = {
        f"optimizer.state.{name}.{key}": tensor
        for name, ours in states.items()
        for key, tensor in dist_tensors(model, ours).items()
    }
    write_dist(tmp_path / "from", model, weights, **more)
    found = torch_dist.open_folder(tmp_path / "from", states=True)
    convert(found, torch_dist.plan(found), tmp_path / "to", {})
    script(OPTIMIZER, kind, tmp_path / "to" / "iter_0000010", tmp_path / "result", case)
    result = torch.load(tmp_path / "result")
    for name, ours in states.items():
        theirs = stage(model, ours, range(model.layers), local=True)
        assert result.keys() == theirs.keys()
        for key, tensor in result.items():
            rows = model.vocab_size if "embedding" in key or "output" in key else None
            assert torch.equal(tensor[name][:rows], theirs[key][:rows])
            assert tensor["step"] == 10


def test_four_ranks_of_megatron_core_save_what_we_read_and_load_what_we_write(tmp_path: Path) -> None:
    """Into the older format, from there into torch_dist, and into the ranks again."""
    case = "head norms"
    run("save", tmp_path / "saved", tmp_path / "none", case, 2, 2)
    found = torch_dist.open_folder(tmp_path / "saved")
    convert(found, megatron.plan(found, Split(2, 2, 2)), tmp_path / "legacy", {})
    legacy = megatron.open_folder(tmp_path / "legacy")
    assert same(read(legacy), read(found))
    convert(legacy, torch_dist.plan(legacy, Split(2, 2)), tmp_path / "to", {})
    run("load", tmp_path / "to" / "release", tmp_path / "none", case, 2, 2)


def test_ranks_with_other_experts_save_what_we_read_and_load_what_we_write(tmp_path: Path) -> None:
    """Two ranks, which share matrices of attention, and of six experts have three each."""
    case = "corrected experts in groups"
    run("save", tmp_path / "saved", tmp_path / "none", case, tp=2, ep=2)
    found = torch_dist.open_folder(tmp_path / "saved")
    assert found.model == MIXED[case]
    convert(found, torch_dist.plan(found, Split(2)), tmp_path / "to", {})
    assert same(read(torch_dist.open_folder(tmp_path / "to")), read(found))
    run("load", tmp_path / "to" / "release", tmp_path / "none", case, tp=2, ep=2)
