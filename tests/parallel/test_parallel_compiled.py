"""Layers under tensor parallelism, compiled: how many graphs there are, and what they compute."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_cases import whole
from ranks import Ranks
from torch import Tensor
from torch._dynamo.utils import counters
from toy_jobs import CPU, MODEL, config_of
from traffic_cases import FP32, NORMED, POST, TP, Overrides, configured

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Config
from megalite.dry_run.run import fake_world
from megalite.model.decoder import Decoder
from megalite.model.positions import TokenPositions
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh, build_stage
from megalite.train.step import gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [({}, (64, 32, 16)), (NORMED, (64,)), (POST, (64,))],
    ids=["plain", "norms of heads", "norms of all heads"],
)
def test_a_layer_is_one_graph(overrides: Overrides, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler could not trace would be an error. Every shape has its graph, none one of symbolic sizes."""
    compile = torch.compile
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda layer, **given: compile(layer, **given, **options))
    config = configured({**TP, **FP32, **overrides, "train.compile": True})
    torch.compiler.reset()
    counters.clear()
    with fake_world(0, 2):
        mesh = build_mesh(config, CPU)
        assert mesh is not None
        stage = build_stage(resolve(config), mesh, 0)
        for graphs, length in enumerate(lengths, start=1):
            x = torch.zeros(length // 2, 1, config.model.width, requires_grad=True)
            _through(stage, x, length).sum().backward()
            assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def _through(stage: Decoder, x: Tensor, length: int) -> Tensor:
    """The first layer of a stage."""
    positions = TokenPositions.whole(stage.model, length, x.device, x.dtype)
    kind = stage.kinds[0]
    return stage.layers["0"](x, positions.angles(kind.rotation), positions.attend(0, kind.attention.heads.scores))


def computed(config: Config) -> tuple[float, dict[str, Tensor]] | None:
    """A rank's loss of a batch and its gradients, as whole tensors, where layers are compiled for autograd alone."""
    mesh = build_mesh(config, CPU)
    if mesh is None:
        return None
    compile = torch.compile
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", lambda layer, **given: compile(layer, **given, backend="aot_eager"))
        job = build(resolve(config), mesh)
        loss = gradients(job, random_batch(job, 0))
    return loss.item(), whole(job)


@pytest.mark.parametrize("norms", ["head", "all"])
def test_compiled_layers_compute_what_eager_ones_do(norms: str, ranks: Ranks) -> None:
    model = replace(MODEL, layers=1, qk_norm=True, qk_norm_width=norms)
    config = config_of(Layout(tp=2), model)
    eager, *_ = ranks.run(computed, config)
    compiled, *_ = ranks.run(computed, replace(config, train=replace(config.train, compile=True)))
    assert compiled[0] == pytest.approx(eager[0], rel=1e-13)
    assert compiled[1].keys() == eager[1].keys()
    for name, grad in eager[1].items():
        assert torch.allclose(compiled[1][name], grad, rtol=1e-12, atol=1e-14), name
