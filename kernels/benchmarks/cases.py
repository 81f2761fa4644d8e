"""Benchmark cases: every op at the sizes of every model, its exact result, and the bytes it must at least move."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypedDict

import torch
from torch import Tensor

from megalite_kernels.adamw import bytes_moved as adamw_bytes
from megalite_kernels.adamw import reference as adamw_reference
from megalite_kernels.add_rms_norm import bytes_moved as add_rms_norm_bytes
from megalite_kernels.add_rms_norm import reference as add_rms_norm_reference
from megalite_kernels.benchmarks.inputs import (
    ACTIVE,
    STEP,
    Inputs,
    Model,
    Random,
    add_norm_inputs,
    collect_inputs,
    cross_entropy_inputs,
    flat,
    float8_inputs,
    gradient_inputs,
    linear_inputs,
    muon_inputs,
    mxfp8_inputs,
    mxfp8_size,
    nf4_inputs,
    nf4_size,
    norm_inputs,
    optimizer_inputs,
    product_inputs,
    qk_norm_inputs,
    rope_inputs,
    spread_inputs,
    swiglu_inputs,
    weighted_swiglu_inputs,
)
from megalite_kernels.cross_entropy import bytes_moved as cross_entropy_bytes
from megalite_kernels.cross_entropy import reference as cross_entropy_reference
from megalite_kernels.float8 import ACTIVATION
from megalite_kernels.float8 import bytes_moved as float8_bytes
from megalite_kernels.grad_norm import bytes_moved as grad_norm_bytes
from megalite_kernels.grad_norm import reference as grad_norm_reference
from megalite_kernels.linear_cross_entropy import reference as linear_cross_entropy_reference
from megalite_kernels.muon import bytes_moved as muon_bytes
from megalite_kernels.muon import reference_momentum, reference_update
from megalite_kernels.mxfp8 import BLOCK, factors, scales_of
from megalite_kernels.mxfp8 import bytes_moved as mxfp8_bytes
from megalite_kernels.nf4 import bytes_moved as nf4_bytes
from megalite_kernels.nf4 import reference as nf4_reference
from megalite_kernels.qk_norm_rope import bytes_moved as qk_norm_rope_bytes
from megalite_kernels.qk_norm_rope import reference as qk_norm_rope_reference
from megalite_kernels.rms_norm import bytes_moved as rms_norm_bytes
from megalite_kernels.rms_norm import reference as rms_norm_reference
from megalite_kernels.rope import bytes_moved as rope_bytes
from megalite_kernels.rope import reference as rope_reference
from megalite_kernels.routed_rows import bytes_moved as routed_rows_bytes
from megalite_kernels.swiglu import bytes_moved as swiglu_bytes
from megalite_kernels.swiglu import reference as swiglu_reference
from megalite_kernels.symmetric_product import reference as symmetric_product_reference
from megalite_kernels.weighted_swiglu import bytes_moved as weighted_swiglu_bytes
from megalite_kernels.weighted_swiglu import reference as weighted_swiglu_reference

EPS = 1e-5  # epsilon of norms


class AdamWOptions(TypedDict):
    """Hyperparameters of AdamW, by the names that torch.optim.AdamW has for them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


ADAMW: AdamWOptions = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON_MOMENTUM, MUON_RATE, MUON_DECAY = 0.95, 1e-3, 0.9999
SEPARATE_PASSES = ("forward", "backward")
WHOLE_PASS = "whole"  # forward and backward together, or all there is of an op without backward


@dataclass(frozen=True)
class BenchmarkCase:
    """One op at the sizes of one model.

    moved: bytes, by part; empty where they are not what bounds an op. exact: results and gradients of leaves, in the
    next wider data type. rounded: to what data type, and how often, any implementation may round on the way.
    """

    op: str
    model: str
    sizes: str
    make: Callable[[torch.device], Inputs]
    exact: Callable[[Inputs], list[Tensor]]
    parts: tuple[str, ...]
    moved: Mapping[str, int]
    rounded: tuple[torch.dtype, int]


@dataclass(frozen=True)
class _Op:
    """A recipe for cases. moved: bytes that forward and backward move, or None for an op that memory does not bound."""

    inputs: Callable[[Model, Random], Inputs]
    reference: Callable[..., Any]
    sizes: Callable[[Model], str]
    moved: Callable[[Model], tuple[int, int] | None]
    parts: tuple[str, ...] = SEPARATE_PASSES
    rounded: tuple[torch.dtype, int] = (torch.bfloat16, 2)


def cases(ops: Iterable[str], models: Iterable[Model]) -> list[BenchmarkCase]:
    """All of `ops` for one model after the other."""
    return [_case(op, sized) for model in models for op in ops for sized in _sizes(op, model)]


def _sizes(op: str, model: Model) -> list[Model]:
    """The model; for linear_cross_entropy also with twice the tokens: only then the logits of 8B come in chunks; for
    symmetric_product also with half the width: where is PyTorch's product as fast?
    """
    shape = model.shape
    if op == "linear_cross_entropy":
        return [model, replace(model, name=f"{model.name}, twice", tokens=2 * model.tokens)]
    if op == "symmetric_product":
        half = replace(shape, width=shape.width // 2, ffn=shape.ffn // 2)
        return [model, replace(model, name=f"{model.name}, half", shape=half)]
    return [model]


def _case(name: str, model: Model) -> BenchmarkCase:
    op = OPS[name]
    moved = op.moved(model)
    return BenchmarkCase(
        op=name,
        model=model.name,
        sizes=op.sizes(model),
        make=lambda device: op.inputs(model, Random(device)),
        exact=partial(_exact, op),
        parts=op.parts,
        moved={} if moved is None else {"forward": moved[0], "backward": moved[1], WHOLE_PASS: sum(moved)},
        rounded=op.rounded,
    )


def _exact(op: _Op, inputs: Inputs) -> list[Tensor]:
    """Return exact results and gradients, from widened leaves. A reference without backward widens tensor by tensor."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in inputs.leaves.values()]
    results = flat(op.reference(*leaves, *inputs.constants))
    if not leaves:
        return results
    gradients = torch.autograd.grad(results, leaves, [grad.float() for grad in inputs.grads])
    return [*(result.detach() for result in results), *gradients]


def _rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rope_reference(q, cos, sin), rope_reference(k, cos, sin)


def _qk_norm_rope_reference(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return qk_norm_rope_reference(q, of_q, cos, sin, EPS), qk_norm_rope_reference(k, of_k, cos, sin, EPS)


def _adamw_reference(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Weights and moments; the last list counts updates."""
    weights, grads, firsts, seconds, _ = lists
    updated = [
        adamw_reference(weight, grad, first, second, STEP + 1, **ADAMW)
        for weight, grad, first, second in zip(weights, grads, firsts, seconds, strict=True)
    ]
    return [list(tensors) for tensors in zip(*updated, strict=True)]


def _muon_reference(
    weights: list[Tensor], grads: list[Tensor], averages: list[Tensor], updates: list[Tensor]
) -> list[Tensor]:
    """Averages and weights."""
    pairs = zip(grads, averages, strict=True)
    found = [reference_momentum(grad, average, MUON_MOMENTUM)[0] for grad, average in pairs]
    both = zip(weights, updates, strict=True)
    return found + [reference_update(weight, update, MUON_RATE, MUON_DECAY) for weight, update in both]


def _float8_reference(x: Tensor, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is rounded to 8 bits, in both layouts."""
    return x.float() * of_rows, (x.float() * of_columns).t()


def _mxfp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is rounded to 8 bits, in both layouts."""
    rows, columns = (each.float() / factors(scales_of(each)).repeat_interleave(BLOCK, -1) for each in (x, x.t()))
    return rows, columns


def _of_heads(count: Callable[..., tuple[int, int]], model: Model) -> tuple[int, int]:
    """Bytes of queries and of keys together."""
    of_q, of_k = (
        count(model.tokens, heads, model.shape.head_size, torch.bfloat16)
        for heads in (model.shape.heads, model.shape.kv_heads)
    )
    return of_q[0] + of_k[0], of_q[1] + of_k[1]


def _rows(of: Callable[[Model], int]) -> Callable[[Model], str]:
    return lambda model: f"{model.tokens} × {of(model)}"


def _heads(model: Model) -> str:
    return f"{model.tokens} × ({model.shape.heads} + {model.shape.kv_heads}) × {model.shape.head_size}"


def _parameters(model: Model) -> str:
    return f"{len(model.parameters())} tensors, {model.elements:,} elements"


def _routed_rows(model: Model) -> str:
    return f"{model.tokens} × {ACTIVE} × {model.shape.width}"


def _routed_rows_bytes(model: Model) -> tuple[int, int]:
    return routed_rows_bytes(model.tokens, ACTIVE, model.shape.width, torch.bfloat16)


FLOAT8 = _Op(
    float8_inputs,
    _float8_reference,
    _rows(lambda model: model.shape.ffn),
    lambda model: (float8_bytes(model.tokens, model.shape.ffn, torch.bfloat16), 0),
    parts=(WHOLE_PASS,),
    rounded=(ACTIVATION, 1),
)
MXFP8 = replace(
    FLOAT8,
    inputs=mxfp8_inputs,
    reference=_mxfp8_reference,
    sizes=lambda model: " × ".join(map(str, mxfp8_size(model))),
    moved=lambda model: (mxfp8_bytes(*mxfp8_size(model), torch.bfloat16), 0),
)
OPS = {
    "rms_norm": _Op(
        norm_inputs,
        lambda x, weight: rms_norm_reference(x, weight, EPS),
        _rows(lambda model: model.shape.width),
        lambda model: rms_norm_bytes(model.tokens, model.shape.width, torch.bfloat16),
    ),
    "add_rms_norm": _Op(
        add_norm_inputs,
        lambda x, y, weight: add_rms_norm_reference(x, y, weight, EPS),
        _rows(lambda model: model.shape.width),
        lambda model: add_rms_norm_bytes(model.tokens, model.shape.width, torch.bfloat16),
    ),
    "swiglu": _Op(
        swiglu_inputs,
        swiglu_reference,
        _rows(lambda model: model.shape.ffn),
        lambda model: swiglu_bytes(model.tokens, model.shape.ffn, torch.bfloat16),
    ),
    "weighted_swiglu": _Op(
        weighted_swiglu_inputs,
        weighted_swiglu_reference,
        lambda model: " × ".join(map(str, model.routed)),
        lambda model: weighted_swiglu_bytes(*model.routed, torch.bfloat16),
    ),
    "spread_rows": _Op(spread_inputs, lambda x, places, tokens: x[tokens], _routed_rows, _routed_rows_bytes),
    "collect_rows": _Op(
        collect_inputs, lambda rows, places, tokens: rows[places].sum(1), _routed_rows, _routed_rows_bytes
    ),
    "rope": _Op(rope_inputs, _rope_reference, _heads, partial(_of_heads, rope_bytes)),
    "qk_norm_rope": _Op(qk_norm_inputs, _qk_norm_rope_reference, _heads, partial(_of_heads, qk_norm_rope_bytes)),
    "cross_entropy": _Op(
        cross_entropy_inputs,
        cross_entropy_reference,
        _rows(lambda model: model.columns),
        lambda model: cross_entropy_bytes(model.tokens, model.columns, torch.bfloat16),
        parts=(*SEPARATE_PASSES, WHOLE_PASS),
    ),
    "linear_cross_entropy": _Op(
        linear_inputs,
        linear_cross_entropy_reference,
        lambda model: f"{model.tokens} × {model.shape.width} × {model.columns}",
        lambda model: None,
        parts=(*SEPARATE_PASSES, WHOLE_PASS),
        rounded=(torch.bfloat16, 4),  # logits, their gradients and sums over chunks are rounded too
    ),
    "adamw": _Op(
        optimizer_inputs,
        _adamw_reference,
        _parameters,
        lambda model: adamw_bytes(model.elements),
        parts=(WHOLE_PASS,),
        rounded=(torch.float32, 8),
    ),
    "muon": _Op(
        muon_inputs,
        _muon_reference,
        lambda model: f"{len(model.matrices())} matrices",
        lambda model: muon_bytes(sum(map(prod, model.matrices()))),
        parts=(WHOLE_PASS,),
        rounded=(torch.float32, 8),
    ),
    "float8": FLOAT8,
    "float8_rowwise": replace(FLOAT8, inputs=partial(float8_inputs, rowwise=True)),
    "mxfp8": MXFP8,
    "dequantize_nf4": _Op(
        nf4_inputs,
        partial(nf4_reference, dtype=torch.float32),
        lambda model: " × ".join(map(str, nf4_size(model))),
        lambda model: (nf4_bytes(prod(nf4_size(model)), torch.bfloat16), 0),
        parts=(WHOLE_PASS,),
        rounded=(torch.bfloat16, 1),
    ),
    "symmetric_product": _Op(
        product_inputs,
        symmetric_product_reference,
        lambda model: f"{model.shape.width} × {model.shape.ffn}",
        lambda model: None,
        parts=(WHOLE_PASS,),
    ),
    # Implementations add up thousands of squares in float32 before they add up these sums.
    "grad_norm": _Op(
        gradient_inputs,
        grad_norm_reference,
        _parameters,
        lambda model: grad_norm_bytes(model.elements, torch.float32),
        parts=(WHOLE_PASS,),
        rounded=(torch.float32, 64),
    ),
}
