"""Layers under tensor parallelism, compiled: how many graphs there are, and what they compute."""

import warnings
from dataclasses import replace

import pytest
import torch
from gradient_cases import whole
from ranks import Ranks
from torch import Tensor
from toy_jobs import CPU, MODEL, config_of

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Attention, Config, Latent
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh
from megalite.train.step import gradients


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


KINDS = {
    "head": {"qk_norm": True},
    "all": {"qk_norm": True, "qk_norm_width": "all"},
    "gemma": {
        "norm": "both",
        "norm_gain": "one_plus_weight",
        "activation": "gelu",
        "qk_norm": True,
        "logits_softcap": 2.0,
        "attention": Attention(5, scale=0.3, window_rope_theta=50.0),
    },
    "latent": {
        "kv_heads": 4,
        "qkv_bias": False,
        "head_width": 6,
        "rotary_width": 4,
        "attention": Attention(latent=Latent(7, 5, 4)),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_compute_what_eager_ones_do(kind: str, ranks: Ranks) -> None:
    config = config_of(Layout(tp=2), replace(MODEL, layers=1, **KINDS[kind]))
    eager, *_ = ranks.run(computed, config)
    compiled, *_ = ranks.run(computed, replace(config, train=replace(config.train, compile=True)))
    assert compiled[0] == pytest.approx(eager[0], rel=1e-13)
    assert compiled[1].keys() == eager[1].keys()
    for name, grad in eager[1].items():
        assert torch.allclose(compiled[1][name], grad, rtol=1e-12, atol=1e-14), name
