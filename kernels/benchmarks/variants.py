"""The implementations of every op that are compared: these kernels, and what a user would otherwise take.

torch.compile is given the op's reference; where that would put it at a disadvantage (complex numbers in `rope`, shapes
that depend on data in `cross_entropy`, float64 in `adamw` and `grad_norm`), plain PyTorch that it compiles better.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import (
    adamw,
    add_rms_norm,
    collect_rows,
    cross_entropy,
    grad_norm,
    linear_cross_entropy,
    muon_momentum,
    muon_update,
    mxfp8,
    qk_norm_rope,
    rms_norm,
    rope,
    spread_rows,
    swiglu,
    symmetric_product,
    weighted_swiglu,
)
from megalite_kernels.add_rms_norm import reference as add_rms_norm_reference
from megalite_kernels.backend import Backend
from megalite_kernels.benchmarks.cases import ADAMW, EPS, MUON_DECAY, MUON_MOMENTUM, MUON_RATE
from megalite_kernels.benchmarks.inputs import Inputs
from megalite_kernels.float8 import ACTIVATION, cast
from megalite_kernels.float8 import reference as float8_reference
from megalite_kernels.nf4 import dequantize_nf4
from megalite_kernels.nf4 import reference as nf4_reference
from megalite_kernels.rms_norm import reference as rms_norm_reference
from megalite_kernels.swiglu import reference as swiglu_reference
from megalite_kernels.weighted_swiglu import reference as weighted_swiglu_reference

MEGALITE, TORCH_COMPILE, EAGER_TORCH, LIGER, MATMULS = "megalite", "torch.compile", "eager", "Liger", "matmuls alone"
LARGE_CHUNK_FACTOR = 16  # times the memory that Liger gives a chunk's logits: chunks are of 4096 tokens at least

Run = Callable[[], Any]
Bind = Callable[[Inputs], Run]


@dataclass(frozen=True)
class Variant:
    """One implementation of an op.

    bind: makes what computes the results of `inputs`, having prepared all that can be; none where there is no such
    implementation. overwrites: whether it or its backward overwrites what it is given. compared: whether its results
    are those of the op.
    """

    kind: str
    name: str
    bind: Bind | None
    overwrites: bool = False
    compared: bool = True


def has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def compile_for(device: torch.device, function: Callable[..., Any], fullgraph: bool) -> Callable[..., Any]:
    """torch.compile, which without CUDA traces but generates no code."""
    backend = "inductor" if device.type == "cuda" else "eager"
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=fullgraph)


def _ours(function: Callable[..., Any], overwrites: bool = False) -> Variant:
    return Variant(MEGALITE, MEGALITE, lambda inputs: partial(function, *inputs.arguments), overwrites)


def _eager(function: Callable[..., Any]) -> Variant:
    return Variant(EAGER_TORCH, EAGER_TORCH, lambda inputs: partial(function, *inputs.arguments))


def _compiled(function: Callable[..., Any]) -> Variant:
    def bind(inputs: Inputs) -> Run:
        return partial(compile_for(inputs.device, function, fullgraph=True), *inputs.arguments)

    return Variant(TORCH_COMPILE, TORCH_COMPILE, bind)


def _liger(function: Callable[..., Any], overwrites: bool = False, name: str = LIGER) -> Variant:
    """Bind `function` of Liger, which takes Liger's module before the arguments."""
    return Variant(LIGER, name, lambda inputs: partial(function, _liger_module(), *inputs.arguments), overwrites)


def _liger_module() -> ModuleType:
    return import_module("liger_kernel.transformers.functional")


def _eager_add_rms_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    return rope(q, cos, sin, backend=backend), rope(k, cos, sin, backend=backend)


def _bind_liger_rope(inputs: Inputs) -> Run:
    """Bind Liger's rope, which takes heads before tokens, and tables of all features."""
    q, k, *angles = inputs.arguments
    cos, sin = (torch.cat((table, table), -1)[None, :, 0, 0] for table in angles)
    module = _liger_module()

    def run() -> tuple[Tensor, Tensor]:
        turned = module.liger_rope(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
        return turned[0].permute(2, 0, 1, 3), turned[1].permute(2, 0, 1, 3)

    return run


def _qk_norm_rope(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    turn = partial(qk_norm_rope, cos=cos, sin=sin, eps=EPS, backend=backend)
    return turn(q, of_q), turn(k, of_k)


def _plain_qk_norm_rope(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the reference computes, rounded once."""
    normal_q, normal_k = rms_norm_reference(q.float(), of_q, EPS), rms_norm_reference(k.float(), of_k, EPS)
    first, second = _rope(normal_q, normal_k, cos, sin, "torch")
    return first.to(q.dtype), second.to(k.dtype)


def _plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _plain_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _plain_cross_entropy(x @ weight.T, targets)


@torch.no_grad()
def _matmuls(x: Tensor, weight: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Run the matrix products of forward and backward, with logits in place of their gradient."""
    logits = x @ weight.T
    return logits @ weight, logits.T @ x


def _adamw(
    weights: list[Tensor], grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], steps: list[Tensor]
) -> tuple[list[Tensor], ...]:
    adamw(weights, grads, firsts, seconds, steps, **ADAMW, backend="triton")
    return weights, firsts, seconds


def _bind_torch_adamw(inputs: Inputs, compiled: bool) -> Run:
    """torch.optim.AdamW over the same states: its fused kernel, or its formula as torch.compile fuses it."""
    weights, grads, firsts, seconds, steps = inputs.constants
    optimizer = torch.optim.AdamW(weights, **ADAMW, foreach=compiled, capturable=compiled, fused=not compiled)
    for weight, grad, first, second, step in zip(weights, grads, firsts, seconds, steps, strict=True):
        weight.grad = grad
        optimizer.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    update = compile_for(inputs.device, optimizer.step, fullgraph=False) if compiled else optimizer.step

    def run() -> tuple[list[Tensor], ...]:
        update()
        return weights, firsts, seconds

    return run


def _muon(
    weights: list[Tensor], grads: list[Tensor], averages: list[Tensor], updates: list[Tensor]
) -> tuple[list[Tensor], ...]:
    directions = [torch.empty_like(update) for update in updates]
    muon_momentum(grads, averages, directions, momentum=MUON_MOMENTUM, nesterov=True, backend="triton")
    rates, decays = [MUON_RATE] * len(weights), [MUON_DECAY] * len(weights)
    muon_update(weights, updates, rates, decays, backend="triton")
    return averages, weights


def _foreach_muon(
    weights: list[Tensor], grads: list[Tensor], averages: list[Tensor], updates: list[Tensor]
) -> tuple[list[Tensor], ...]:
    """The same over lists of tensors, as a user would write it; directions are made, and rounded."""
    torch._foreach_lerp_(averages, grads, 1 - MUON_MOMENTUM)
    directions = [u.bfloat16() for u in torch._foreach_lerp(grads, averages, MUON_MOMENTUM)]
    torch._foreach_mul_(weights, MUON_DECAY)
    torch._foreach_add_(weights, [update.float() for update in updates], alpha=-MUON_RATE)
    return averages, weights, directions


def _bind_foreach_muon(inputs: Inputs, compiled: bool) -> Run:
    step = compile_for(inputs.device, _foreach_muon, fullgraph=True) if compiled else _foreach_muon
    return lambda: step(*inputs.arguments)[:2]


def _plain_grad_norm(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def _plain_float8(x: Tensor, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
    return float8_reference(x, of_rows, ACTIVATION), float8_reference(x, of_columns, ACTIVATION).t().contiguous()


def _plain_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    found = mxfp8.cast(x, by_rows=True, by_columns=True, in_tiles=True, backend="torch")
    return found[0], found[2]


NO_LIGER = Variant(LIGER, LIGER, None)
FLOAT8 = [
    _ours(lambda x, of_rows, of_columns: cast(x, ACTIVATION, of_rows, of_columns, "triton")),
    _compiled(_plain_float8),
    _eager(_plain_float8),
    NO_LIGER,
]
VARIANTS = {
    "rms_norm": [
        _ours(lambda x, weight: rms_norm(x, weight, EPS, "triton")),
        _compiled(lambda x, weight: rms_norm_reference(x, weight, EPS)),
        _eager(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        _liger(lambda liger, x, weight: liger.liger_rms_norm(x, weight, EPS), overwrites=True),
    ],
    "add_rms_norm": [
        _ours(lambda x, y, weight: add_rms_norm(x, y, weight, EPS, "triton")),
        _compiled(lambda x, y, weight: add_rms_norm_reference(x, y, weight, EPS)),
        _eager(_eager_add_rms_norm),
        _liger(lambda liger, x, y, weight: liger.liger_fused_add_rms_norm(x, y, weight, EPS), overwrites=True),
    ],
    "swiglu": [
        _ours(lambda gate, up: swiglu(gate, up, "triton")),
        _compiled(swiglu_reference),
        _eager(lambda gate, up: F.silu(gate) * up),
        _liger(lambda liger, gate, up: liger.liger_swiglu(gate, up), overwrites=True),
    ],
    "weighted_swiglu": [
        _ours(lambda gate, up, scores: weighted_swiglu(gate, up, scores, "triton")),
        _compiled(weighted_swiglu_reference),
        _eager(lambda gate, up, scores: (F.silu(gate) * up * scores[:, None]).to(gate.dtype)),
        NO_LIGER,
    ],
    "spread_rows": [
        _ours(lambda x, places, tokens: spread_rows(x, places, "triton")),
        _compiled(lambda x, places, tokens: x[tokens]),
        _eager(lambda x, places, tokens: x[tokens]),
        NO_LIGER,
    ],
    "collect_rows": [
        _ours(lambda rows, places, tokens: collect_rows(rows, places, "triton")),
        _compiled(lambda rows, places, tokens: rows[places].sum(1)),
        _eager(lambda rows, places, tokens: rows[places].sum(1)),
        NO_LIGER,
    ],
    "rope": [
        _ours(partial(_rope, backend="triton")),
        _compiled(partial(_rope, backend="torch")),
        _eager(partial(_rope, backend="torch")),
        Variant(LIGER, LIGER, _bind_liger_rope, overwrites=True),
    ],
    "qk_norm_rope": [
        _ours(partial(_qk_norm_rope, backend="triton")),
        _compiled(_plain_qk_norm_rope),
        _eager(partial(_qk_norm_rope, backend="torch")),
        NO_LIGER,
    ],
    "cross_entropy": [
        _ours(lambda logits, targets: cross_entropy(logits, targets, backend="triton"), overwrites=True),
        _compiled(_plain_cross_entropy),
        _eager(_plain_cross_entropy),
        _liger(
            lambda liger, logits, targets: liger.liger_cross_entropy(logits, targets, reduction="sum"), overwrites=True
        ),
    ],
    "linear_cross_entropy": [
        _ours(lambda x, weight, targets: linear_cross_entropy(x, weight, targets, backend="triton")),
        _compiled(_plain_linear_cross_entropy),
        _eager(_plain_linear_cross_entropy),
        _liger(
            lambda liger, x, weight, targets: liger.liger_fused_linear_cross_entropy(
                x, weight, targets, reduction="sum"
            )
        ),
        _liger(
            lambda liger, x, weight, targets: liger.liger_fused_linear_cross_entropy(
                x, weight, targets, reduction="sum", accum_dtype=torch.float32, chunk_mem_const=LARGE_CHUNK_FACTOR
            ),
            name="Liger, large chunks",
        ),
        Variant(MATMULS, MATMULS, lambda inputs: partial(_matmuls, *inputs.arguments), compared=False),
    ],
    "adamw": [
        _ours(_adamw),
        Variant(TORCH_COMPILE, TORCH_COMPILE, partial(_bind_torch_adamw, compiled=True)),
        Variant(EAGER_TORCH, EAGER_TORCH, partial(_bind_torch_adamw, compiled=False)),
        NO_LIGER,
    ],
    "muon": [
        _ours(_muon),
        Variant(TORCH_COMPILE, TORCH_COMPILE, partial(_bind_foreach_muon, compiled=True)),
        Variant(EAGER_TORCH, EAGER_TORCH, partial(_bind_foreach_muon, compiled=False)),
        NO_LIGER,
    ],
    **dict.fromkeys(("float8", "float8_rowwise"), FLOAT8),
    "mxfp8": [
        _ours(lambda x: mxfp8.cast(x, by_rows=True, by_columns=True, in_tiles=True, backend="triton")[::2]),
        _compiled(_plain_mxfp8),
        _eager(_plain_mxfp8),
        NO_LIGER,
    ],
    "dequantize_nf4": [
        _ours(lambda packed: dequantize_nf4(packed, torch.bfloat16, "triton")),
        _compiled(lambda packed: nf4_reference(packed, torch.bfloat16)),
        _eager(lambda packed: nf4_reference(packed, torch.bfloat16)),
        NO_LIGER,
    ],
    "symmetric_product": [
        _ours(lambda x: symmetric_product(x, backend="triton")),
        _compiled(lambda x: x @ x.mT),
        _eager(lambda x: x @ x.mT),
        NO_LIGER,
    ],
    "grad_norm": [
        _ours(lambda grads: grad_norm(grads, backend="triton")),
        _compiled(_plain_grad_norm),
        _eager(torch.nn.utils.get_total_norm),
        NO_LIGER,
    ],
}
