"""Layers under tensor parallelism, compiled: what they compute, and what they keep for backward."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from four_bits import needs_integers
from gradient_cases import whole
from ranks import Ranks
from torch import Tensor
from toy_jobs import CPU, MODEL, config_of

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Attention, Latent
from megalite.config.schema import Config
from megalite.parallel.copies import Copies
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh
from megalite.train.step import gradients


def computed(
    config: Config, fullgraph: bool = False, copied: bool = False
) -> tuple[float, dict[str, Tensor], set[int]] | None:
    """A rank's loss of a batch, its gradients, as whole tensors, and the sizes of the matrices that it keeps for them.

    Layers are compiled for autograd alone. fullgraph: in one graph each. copied: with copies of parameters. Factors and
    norms that begin at 0 do not.
    """
    mesh = build_mesh(config, CPU)
    if mesh is None:
        return None
    compile, kept = torch.compile, set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.is_floating_point():
            kept.add(tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": fullgraph}
        patch.setattr(torch, "compile", lambda layer, **given: compile(layer, **given, **options))
        job = build(resolve(config), mesh)
        if copied:
            job.copies.extend(Copies(stage, torch.float64) for stage in job.stages.values())
        with torch.no_grad():
            for name, param in job.named_parameters():
                if ".lora_b." in name or name.endswith(".lora_m"):
                    param.fill_(0.02)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = gradients(job, random_batch(job, 0))
    return loss.item(), whole(job), kept


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
    _, differing = compared(config_of(Layout(tp=2), replace(MODEL, layers=1, **KINDS[kind])), ranks)
    assert not differing


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_compiled_layers_of_copies_compute_what_eager_ones_do(kernel: str, ranks: Ranks) -> None:
    """One product each takes q, k and v, with biases, and gate and up."""
    config = config_of(Layout(tp=2), replace(MODEL, out_bias=True))
    config = replace(config, kernels=replace(config.kernels_by_operation, rope=kernel, swiglu=kernel))
    _, differing = compared(config, ranks, fullgraph=True, copied=True)
    assert not differing


@needs_integers
@pytest.mark.parametrize("dora", [False, True])
def test_compiled_layers_make_weights_in_four_bits_wide_once_more_for_backward(dora: bool, ranks: Ranks) -> None:
    model = replace(MODEL, layers=1, width=64, heads=4, kv_heads=4, head_width=32, ffn=128, out_bias=True)
    adapter = Adapter(rank=3, dora=dora, base="nf4")
    config = replace(config_of(Layout(tp=2, dp_shard=2), model), adapter=adapter)
    kept, differing = compared(config, ranks, fullgraph=True)
    assert not differing
    assert kept  # matrices of other sizes, such as factors
    assert not kept & {64 * 64}  # the matrices of a rank in four bits


def compared(config: Config, ranks: Ranks, fullgraph: bool = False, copied: bool = False) -> tuple[set[int], list[str]]:
    """Compare compiled layers with eager ones, which have no copies of parameters.

    Returns the sizes of matrices that the compiled ones keep, and the names of gradients that differ.
    """
    eager, *_ = ranks.run(computed, config)
    compiled, *_ = ranks.run(computed, replace(config, train=replace(config.train, compile=True)), fullgraph, copied)
    assert compiled[0] == pytest.approx(eager[0], rel=1e-13)
    assert compiled[1].keys() == eager[1].keys()
    differing = [
        name for name, grad in eager[1].items() if not torch.allclose(compiled[1][name], grad, rtol=1e-12, atol=1e-14)
    ]
    return compiled[2], differing
