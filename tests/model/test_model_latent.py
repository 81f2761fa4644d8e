"""Latent attention against another implementation: complex pairs, one query at a time, differentiated by autograd."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.attention_kernels import Kernel
from megalite.config.layers import Heads, Latent, Rope, Rotation, Scores, layer_kinds
from megalite.config.model_schema import Attention, Model, RopeScaling
from megalite.config.model_schema import Latent as LatentKeys
from megalite.config.schema import Kernels
from megalite.distributed.mesh import Mesh
from megalite.model.latent import LatentAttention
from megalite.model.positions import angles, attention_factor
from megalite.parallel.context import attention
from megalite.parallel.parameter import part
from megalite.plan.parts.latent import LatentPart

WIDTH, LENGTH, SEQUENCES, BASE = 14, 9, 2, 100.0
HEADS = Heads(3, 3, width=10, rotary_width=4, value_width=6)
CASES: dict[str, tuple[Latent, Kernel | None, list[tuple[int, ...]] | None]] = {
    "latents of both": (Latent(HEADS, 7, 5), None, None),
    "queries of the token": (Latent(HEADS, None, 5), None, None),
    "explicit": (Latent(HEADS, 7, 5), "math", None),
    "values as wide as keys": (Latent(replace(HEADS, value_width=10), 7, 5), None, None),
    "scaled, window": (Latent(replace(HEADS, scores=Scores(4, None, 0.7)), 7, 5), None, None),
    "capped": (Latent(replace(HEADS, scores=Scores(None, 0.4)), 7, 5), None, None),
    "documents": (Latent(HEADS, None, 5), None, [(0, 4, 9), (0, 1, 7, 9)]),
}


def reference(
    x: Tensor, weights: dict[str, Tensor], kind: Latent, rotary: bool, documents: list[tuple[int, ...]]
) -> Tensor:
    """Output `[s, b, d]`. Pairs of features are complex numbers, so nothing is put together as the module does."""
    heads, half = kind.heads, kind.heads.rotary_width // 2
    turns = [BASE ** (-2 * pair / heads.rotary_width) if rotary else 0.0 for pair in range(half)]

    def normal(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def pairs(y: Tensor) -> Tensor:
        return torch.complex(*y.unflatten(-1, (-1, 2)).unbind(-1))

    rows = []
    for item in range(x.shape[1]):
        tokens = x[:, item]
        of_queries = normal(tokens @ weights["q_down"].T, weights["q_norm"]) if kind.query_rank else tokens
        latent = normal(tokens @ weights["kv_down"].T, weights["kv_norm"])
        angle = torch.outer(torch.arange(len(x), dtype=torch.float64), torch.tensor(turns, dtype=torch.float64))
        phases = torch.polar(torch.ones_like(angle), angle)
        queries = pairs((of_queries @ weights["q_up" if kind.query_rank else "q"].T).unflatten(-1, (heads.count, -1)))
        own = pairs((latent @ weights["k_up"].T).unflatten(-1, (heads.count, -1)))
        shared = pairs(tokens @ weights["k_shared"].T) * phases
        values = (latent @ weights["v_up"].T).unflatten(-1, (heads.count, -1))
        scale = heads.width**-0.5 if heads.scores.scale is None else heads.scores.scale
        for at in range(len(x)):
            begin = max(each for each in documents[item] if each <= at)
            seen = slice(max(begin, at + 1 - (heads.scores.window or at + 1)), at + 1)
            outs = []
            for head in range(heads.count):
                turning, still = queries[at, head, :half] * phases[at], queries[at, head, half:]
                scores = (shared[seen] * turning.conj()).real.sum(-1) + (own[seen, head] * still.conj()).real.sum(-1)
                scores = scores * scale
                if heads.scores.softcap is not None:
                    scores = heads.scores.softcap * (scores / heads.scores.softcap).tanh()
                outs.append(scores.softmax(0) @ values[seen, head])
            rows.append(torch.cat(outs) @ weights["o"].T)
    return torch.stack(rows).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_latent_attention_is_that_of_the_paper(case: str, rotary: bool, alone: Mesh) -> None:
    kind, kernel, documents = CASES[case]
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    module = LatentAttention(LatentPart(WIDTH, kind), False, alone.tp, Kernels.all("torch")).to(torch.float64)
    module = module.to_empty(device=device)
    leaves, weights = {}, {}
    for name, param in module.named_parameters():
        values = torch.randn(param.shape, dtype=torch.float64, generator=generator) * 0.4 + ("norm" in name)
        part(param).data.copy_(values)
        leaves[name.removesuffix(".weight")] = param
        weights[name.removesuffix(".weight")] = values.requires_grad_()
    x, grad = (torch.randn(LENGTH, SEQUENCES, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    rotation = Rotation(Rope(BASE), kind.heads.width, kind.heads.rotary_width)
    turned = angles(rotation, torch.arange(LENGTH), torch.float64, LENGTH) if rotary else ()
    attend = attention("ring", None, LENGTH, device, documents, kind.heads.scores, kernel)
    found = module(mine, turned, attend)
    found.backward(grad)
    expected = reference(theirs, weights, kind, rotary, documents or [(0, LENGTH)] * SEQUENCES)
    expected.backward(grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for name, values in weights.items():
        torch.testing.assert_close(leaves[name].grad.to_local(), values.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "factor", "sharper"),
    [
        (None, None, 1 + math.log(40) / 10, 1.0),
        (1.0, 1.0, 1.0, (1 + math.log(40) / 10) ** 2),
        (0.707, 0.707, 1.0, (1 + 0.0707 * math.log(40)) ** 2),
        (2.0, 1.0, (1 + math.log(40) / 5) / (1 + math.log(40) / 10), (1 + math.log(40) / 10) ** 2),
        (None, 0.5, 1 + math.log(40) / 10, (1 + math.log(40) / 20) ** 2),
    ],
)
def test_yarn_sharpens_scores(mscale: float | None, all_dim: float | None, factor: float, sharper: float) -> None:
    scaling = RopeScaling("yarn", 40.0, mscale=mscale, mscale_all_dim=all_dim)
    model = Model(heads=2, kv_heads=2, head_width=10, rotary_width=4, rope_scaling=scaling)
    model = replace(model, attention=Attention(latent=LatentKeys(None, 5, 6)))
    (kind,) = set(layer_kinds(model))
    scale = kind.attention.heads.scores.scale
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)
    assert (10**-0.5 if scale is None else scale) == pytest.approx(sharper * 10**-0.5, rel=1e-15)
