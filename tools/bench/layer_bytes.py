"""Bytes that a training step moves per token and layer beside matrix products and attention: exact, without a GPU.

Layers of a model run forward and backward on tensors without data, with Triton's kernels and bf16 copies of parameters,
as on one data-parallel rank. A dispatch mode sees every operation, and counts each of its tensors once: as if caches
held nothing from one operation to the next, and everything within one. A matrix product counts with what it adds to.
Differences of models and of sequences are those of a layer and of its tokens: what is read and written of weights
cancels out.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.layers import layer_kinds
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.model_schema import Model
from megalite.config.schema import Kernels
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.positions import TokenPositions
from megalite.parallel.copies import Copies
from megalite_tools.bench.moved_bytes import MovedBytes

META = torch.device("meta")
DEEP, SHALLOW = 3, 2  # layers
LONG, SHORT = 512, 256  # tokens


def bytes_per_layer(preset: str, *settings: str) -> Counter[str]:
    """Bytes per token and layer of the model that `preset` names, by operation. Needs a process group."""
    model = load([preset], settings).model
    found = Counter[str]()
    for layers, tokens, sign in ((DEEP, LONG, 1), (SHALLOW, LONG, -1), (DEEP, SHORT, -1), (SHALLOW, SHORT, 1)):
        for name, size in _moved(model, layers, tokens).bytes.items():
            found[name] += sign * size
    return Counter({name: size // (LONG - SHORT) // (DEEP - SHALLOW) for name, size in found.items() if size})


def operations_per_layer(preset: str) -> Counter[str]:
    """The operations of a layer, forward and backward, with matrix products, but without attention's two.

    Copies of gradients into their sums are among them, which products make on a GPU.
    """
    model = load([preset], ()).model
    deep, shallow = (_moved(model, layers, SHORT).operations for layers in (DEEP, SHALLOW))
    return deep - shallow


def _moved(model: Model, layers: int, tokens: int) -> MovedBytes:
    """Bytes and operations of `layers` layers for a sequence of so many tokens."""
    model = replace(model, layers=layers)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    stage = Decoder(model, mesh.tp, range(layers), first=False, last=False, kernels=Kernels.all("triton"))
    copies = Copies(stage, torch.bfloat16)
    copies.refresh()
    positions = TokenPositions.whole(model, tokens, META, torch.bfloat16)
    kinds = {kind.attention.heads.scores for kind in layer_kinds(model)}
    positions = replace(positions, attention=dict.fromkeys(kinds, _Attend.apply))
    x = torch.empty(tokens, 1, model.width, dtype=torch.bfloat16, device=META, requires_grad=True)
    with MovedBytes(lambda name, tensor: True) as moved:
        stage(x, positions).backward(torch.empty_like(x))
    return moved


class _Attend(torch.autograd.Function):
    """Takes the place of attention: nothing but its output and its gradients are made."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors)
