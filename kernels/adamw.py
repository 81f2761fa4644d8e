"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over many tensors in one launch:

    m = β₁·m + (1 − β₁)·c·g        v = β₂·v + (1 − β₂)·(c·g)²        (c: the clipping coefficient)
    w = (1 − lr·λ)·w − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)

Weights, moments and the optional copy of the weights in a narrower data type are each read and written at most once.
Factors that depend on t, the number of the update, are computed in float64, because βᵗ is near 1 and 1 − βᵗ would have
few correct digits in float32. They are computed on the device, because only the device knows whether an update is
skipped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw

from megalite_kernels.backend import Backend, Program, jit, on_device, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import LLAMAS, CompileCase, meta
from megalite_kernels.tensor_table import check_contiguous, find, launches, numbers_on, pointer, size_of

PROGRAM = Program(elements=4096, warps=16)  # a block is a part of a chunk


def reference(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weight and moments after update number `step`, counted from 1, in float64."""
    weight, grad, first, second = (tensor.double() for tensor in (weight, grad * clip, first, second))
    first = betas[0] * first + (1 - betas[0]) * grad
    second = betas[1] * second + (1 - betas[1]) * grad.square()
    direction = first / (1 - betas[0] ** step) / ((second / (1 - betas[1] ** step)).sqrt() + eps)
    return weight - lr * (weight_decay * weight + direction), first, second


@jit
def _adamw_kernel(
    Table, Factors, Clip, FoundInf, tensors,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one tensor. Factors of each tensor: lr/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ), 1 − lr·λ."""
    tensor = find(Table, tensors, COLUMNS, STEPS)
    row = tensor * COLUMNS
    start = (tl.program_id(0) - tl.load(Table + row)) * CHUNK
    size = size_of(Table, row, ALIGNED)
    weights = pointer(Table, row + 2, WEIGHT, ALIGNED)
    grads = pointer(Table, row + 3, GRAD, ALIGNED)
    firsts = pointer(Table, row + 4, STATE, ALIGNED)
    seconds = pointer(Table, row + 5, STATE, ALIGNED)
    rate = tl.load(Factors + tensor * 3)
    correction = tl.load(Factors + tensor * 3 + 1)
    decay = tl.load(Factors + tensor * 3 + 2)
    if FoundInf is not None:
        size = tl.where(tl.load(FoundInf) == 0, size, 0)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        inside = at < size
        g = widen(tl.load(grads + at, mask=inside, other=0.0))
        if Clip is not None:
            g *= tl.load(Clip)
        m = widen(tl.load(firsts + at, mask=inside, other=0.0))
        v = widen(tl.load(seconds + at, mask=inside, other=0.0))
        w = widen(tl.load(weights + at, mask=inside, other=0.0))
        m = m * BETA1 + g * (1 - BETA1)
        v = v * BETA2 + g * g * (1 - BETA2)
        w = w * decay - rate * (m / (tl.sqrt(v) * correction + EPS))
        tl.store(firsts + at, m.to(STATE), mask=inside)
        tl.store(seconds + at, v.to(STATE), mask=inside)
        tl.store(weights + at, w.to(WEIGHT), mask=inside)
        if COPY is not None:
            copies = pointer(Table, row + 6, COPY, ALIGNED)
            tl.store(copies + at, w.to(COPY), mask=inside)


@on_device
def launch_adamw(
    lists: Sequence[Sequence[Tensor]], factors: Tensor, clip: Tensor | None, found_inf: Tensor | None,
    betas: tuple[float, float], eps: float, program: Program = PROGRAM,
) -> None:  # fmt: skip
    """Launch the kernel. lists: weights, gradients, both moments and, if any, copies; factors `[tensors, 3]`."""
    for numbers, tensors, (weight, grad, state, _, *copy), table, programs, options in launches(lists):
        wide = wide_dtype(tensors[0][0].dtype)
        chosen = factors[numbers_on(factors.device, numbers)].to(wide)
        _adamw_kernel[(programs,)](
            table, chosen, None if clip is None else clip.to(wide), found_inf, len(numbers),
            BETA1=betas[0], BETA2=betas[1], EPS=eps, COLUMNS=table.shape[1],
            WEIGHT=weight, GRAD=grad, STATE=state, COPY=copy[0] if copy else None,
            BLOCK=program.elements, num_warps=program.warps, **options,
        )  # fmt: skip


@torch.library.custom_op("megalite::adamw", mutates_args=("weights", "firsts", "seconds", "copies"))
def _op(
    weights: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
    copies: Sequence[Tensor], factors: Tensor, clip: Tensor | None, found_inf: Tensor | None,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    whole = [grad.contiguous() for grad in grads]
    lists = [weights, whole, firsts, seconds, *([copies] if copies else [])]
    launch_adamw(lists, factors, clip, found_inf, (beta1, beta2), eps)


@_op.register_fake
def _(*_: Any) -> None:
    return None


def _plain_adamw(
    weights: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
    copies: Sequence[Tensor], factors: Tensor, clip: Tensor | None, found_inf: Tensor | None,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    for number, (weight, grad, first, second) in enumerate(zip(weights, grads, firsts, seconds, strict=True)):
        wide = wide_dtype(weight.dtype)
        rate, correction, decay = factors[number].to(wide)
        g = grad.to(wide) if clip is None else grad.to(wide) * clip
        m = beta1 * first.to(wide) + (1 - beta1) * g
        v = beta2 * second.to(wide) + (1 - beta2) * g * g
        w = weight.to(wide) * decay - rate * (m / (v.sqrt() * correction + eps))
        changed = [(first, m), (second, v), (weight, w), *([(copies[number], w)] if copies else [])]
        for old, new in changed:
            old.copy_(new if found_inf is None else torch.where(found_inf == 0, new.to(old.dtype), old))


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    copies: Sequence[Tensor] = (),
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Update weights and their moments in place. Gradients are not overwritten.

    The i-th tensors of all lists belong together; they may be empty. Moments are float32 or, for float64 weights,
    float64. steps: float32, 0-dimensional: the numbers of updates so far, which are incremented. copies: tensors of any
    data type that receive the weights after the update. clip, 0-dimensional: gradients are multiplied by it. found_inf,
    float32 of one element: if it is not 0, nothing changes. All tensors but gradients must be contiguous.
    """
    check_contiguous("adamw", (*weights, *firsts, *seconds, *copies))
    if not weights:
        return
    counts = list(steps)
    if found_inf is None:
        torch._foreach_add_(counts, 1)
    else:
        updated = (found_inf == 0).to(torch.float32).reshape(())
        torch._foreach_add_(counts, updated, alpha=1)  # without alpha, `updated` is a number, and the host waits for it
    update = torch.stack(counts).double()
    rates, corrections = lr / (1 - betas[0] ** update), (1 - betas[1] ** update).rsqrt()
    factors = torch.stack((rates, corrections, torch.full_like(rates, 1 - lr * weight_decay)), 1)
    run = _op if use_triton(backend, weights[0].device) else _plain_adamw
    run(weights, grads, firsts, seconds, copies, factors, clip, found_inf, *betas, eps)


@torch.no_grad()
def fused_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    copies: Sequence[Tensor] = (),
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do what `adamw` does with the kernel of `torch.optim.AdamW(fused=True)`; for `FusedAdamW(…, update=fused_adamw)`.

    There are three differences: all tensors of a parameter but its copy have one data type, gradients are overwritten
    by the clipped ones, and copies take another pass.
    """
    if clip is not None and grads:
        torch._foreach_mul_(list(grads), clip.to(grads[0].dtype))
    torch_adamw(
        list(weights), list(grads), list(firsts), list(seconds), [], list(steps), fused=True, found_inf=found_inf,
        amsgrad=False, maximize=False, beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
    )  # fmt: skip
    if copies:
        torch._foreach_copy_(list(copies), list(weights))


def fastest_adamw(weights: Sequence[Tensor], *others: Sequence[Tensor], **options: Any) -> None:
    """Do what `adamw` does: in its kernel where there is a GPU and Triton, which took .66 of the time on an H200; else
    in PyTorch's.
    """
    if weights:
        (adamw if use_triton("auto", weights[0].device) else fused_adamw)(weights, *others, **options)


def _zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros_like(_local(tensor), dtype=dtype)
    if not isinstance(tensor, DTensor):
        return zeros
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(zeros, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


class FusedAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with the same state, which calls `update` once per group: `adamw`, or a similar function.

    Parameters may be DTensors. Their local tensors are updated: with DTensors, PyTorch's optimizer needs some 10 ms
    for each in its first step, to find that nothing must be communicated. A training loop may set two attributes before
    a step, found_inf and clip: tensors with the same meaning as these arguments of `adamw`. zeros: makes a moment of a
    parameter, in a data type; a caller may keep moments elsewhere, where `update` can use them. copy_of: the copy of a
    parameter that updates write too, or None; either all parameters have one or none has.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        update: Callable[..., None] = adamw,
        zeros: Callable[[Tensor, torch.dtype], Tensor] = _zeros_like,
        copy_of: Callable[[Tensor], Tensor | None] = lambda _: None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.update, self.zeros, self.copy_of = update, zeros, copy_of
        self.found_inf: Tensor | None = None
        self.clip: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            states = [self.states_of(param) for param in params]
            copies = [self.copy_of(param) for param in params] if params and self.copy_of(params[0]) is not None else []
            placed = [isinstance(param, DTensor) for param in params]
            self.update(
                _locals(params, placed),
                _locals([param.grad for param in params], placed),
                _locals([state["exp_avg"] for state in states], placed),
                _locals([state["exp_avg_sq"] for state in states], placed),
                [state["step"] for state in states],
                lr=float(group["lr"]),
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                clip=self.clip,
                found_inf=self.found_inf,
                **({"copies": copies} if copies else {}),
            )

    def states_of(self, param: Tensor) -> dict[str, Tensor]:
        """The moments and the number of updates of a parameter. Missing states are created as zeros."""
        state = self.state[param]
        if not state:
            wide = wide_dtype(param.dtype)
            moments = {moment: self.zeros(param, wide) for moment in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.runs_on(param))
            state |= moments
        elif state["step"].device != (device := self.runs_on(param)):
            state["step"] = state["step"].to(device)  # loaded from a torch.optim.AdamW, which keeps steps on the host
        return state

    def runs_on(self, param: Tensor) -> torch.device:
        """The device of the update of a parameter: its own."""
        return param.device

    def buffers(self) -> list[Tensor]:
        """Tensors kept beside states: none."""
        return []


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _locals(tensors: Sequence[Any], placed: Sequence[bool]) -> list[Tensor]:
    """Local tensors of those that are `placed`, and the others, without the checks of `to_local`, which take long."""
    return [tensor._local_tensor if here else tensor for tensor, here in zip(tensors, placed, strict=True)]


def bytes_moved(elements: int, grad: torch.dtype = torch.float32, copy: torch.dtype | None = None) -> tuple[int, int]:
    """Bytes moved: gradients in; float32 weights and moments in and out; copies out. There is no backward."""
    return elements * (grad.itemsize + 6 * 4 + (copy.itemsize if copy else 0)), 0


def compile_cases() -> Iterator[CompileCase]:
    for model, shape in LLAMAS.items():
        weights = [meta(shape.ffn, shape.width, dtype=torch.float32)] * 300
        factors, one = meta(300, 3, dtype=torch.float32), meta(dtype=torch.float32)
        for grad, copy in ((torch.float32, ()), (torch.float32, (torch.bfloat16,)), (torch.bfloat16, ())):
            others = [[meta(shape.ffn, shape.width, dtype=dtype)] * 300 for dtype in copy]
            lists = [weights, [meta(shape.ffn, shape.width, dtype=grad)] * 300, weights, weights, *others]
            launch = partial(launch_adamw, lists, factors, one, one, (0.9, 0.95), 1e-8)
            yield CompileCase("adamw with copy" if copy else "adamw", model, grad, launch)
