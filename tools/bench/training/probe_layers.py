"""Groups of the probe beside matrix products: attention by every backend, the loss, and the optimizer's step."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from megalite_kernels import adamw, linear_cross_entropy
from megalite_kernels.backend import Backend
from megalite_kernels.benchmarks.cases import AdamWOptions
from megalite_kernels.benchmarks.inputs import TINY_MODEL, Model, fitting
from megalite_kernels.benchmarks.timing import Call
from megalite_kernels.benchmarks.variants import compile_for
from megalite_kernels.compile_cases import LLAMAS
from megalite_tools.bench.training.probe_figures import Figures, timed

HEADS = {  # numbers of query heads and of key heads, and their width: those of Llama 3.2 1B, 3.2 3B and 3 8B
    "32 heads of 64": (32, 8, 64),
    "24 heads of 128": (24, 8, 128),
    "32 heads of 128": (32, 8, 128),
}
TINY_HEADS = {"4 heads of 16": (4, 2, 16)}
SEQUENCE, TINY_SEQUENCE = 8192, 64
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BACKWARD_WORK = 2.5  # products of backward for each of forward: five, one of which forward has made too, to two
HEAD, TINY_HEAD = (8192, 4096, 128256), (32, 16, 64)  # tokens, width, vocabulary
COMPILE_SECONDS = 15.0  # torch.compile may take so long for the loss
PARAMETERS = Model("1B", LLAMAS["Llama 3.2 1B"], tokens=0, columns=0, layers=16, ranks=1)
ADAMW: AdamWOptions = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def attention(figures: Figures) -> None:
    """Time causal attention with grouped queries, one sequence at a time, in the layout `[s, b, h, e]` of training."""
    length = TINY_SEQUENCE if figures.tiny else SEQUENCE
    backends = (*BACKENDS, SDPBackend.MATH) if figures.tiny else BACKENDS
    for heads, sizes in (TINY_HEADS if figures.tiny else HEADS).items():
        q, k, v = _queries_keys_values(*sizes, length, figures.device)
        flops = 2 * length**2 * sizes[0] * sizes[2]  # half of the square
        for backend in backends:
            forward = partial(_attend, q, k, v, backend)
            name = f"{heads}, {backend.name.removesuffix('_ATTENTION').lower()}"
            figures.measure(f"{name}, forward", partial(_forward, figures, forward, flops))
            figures.measure(f"{name}, backward", partial(_backward, figures, forward, (q, k, v), BACKWARD_WORK * flops))
        figures.measure(f"{heads}, chosen", partial(_chosen, q, k, v))
        figures.measure(f"{heads}, kernels", partial(_kernels, q, k, v))


def _queries_keys_values(heads: int, kv_heads: int, width: int, length: int, device: torch.device) -> list[Tensor]:
    """Random tensors `[b, h, s, e]` whose memory is in the order `s, b, h, e`."""
    return [
        torch.randn(length, 1, count, width, dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def _attend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _forward(figures: Figures, forward: Callable[[], Tensor], flops: float) -> dict[str, float]:
    """Time a forward with gradients on, so that it keeps what backward needs."""
    times = figures.clock.times(Call(lambda _: forward()))
    return timed(times, tflops=flops / times.median / 1e12)


def _backward(
    figures: Figures, forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], flops: float
) -> dict[str, float]:
    gradient = torch.randn_like(forward())  # in the order of the output, for others are copied first
    times = figures.clock.times(Call(lambda output: torch.autograd.grad(output, leaves, gradient), forward))
    return timed(times, tflops=flops / times.median / 1e12)


def _chosen(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """The backend that PyTorch takes when none is named."""
    return {"backend": SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)).name}


def _kernels(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """The kernels that take the most time when no backend is named: the choice above may be read wrongly."""
    output = _attend(q, k, v)
    gradient = torch.randn_like(output)
    return {
        "forward": _longest(lambda: _attend(q, k, v), q.device),
        "backward": _longest(lambda: torch.autograd.grad(output, (q, k, v), gradient), q.device),
    }


def _longest(run: Callable[[], Any], device: torch.device) -> str:
    """The name of the kernel, or on a CPU of the operation, that takes the most time."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = profiled.events()
    if on_gpu:
        times = [
            (event.time_range.elapsed_us(), event.name) for event in events if event.device_type == DeviceType.CUDA
        ]
    else:
        times = [(event.self_cpu_time_total, event.name) for event in events]
    if not times:
        raise RuntimeError("the profiler has seen no kernel")
    return max(times)[1]


def cross_entropy(figures: Figures) -> None:
    """Time forward and backward of the head and the loss, and the head's three products alone."""
    tokens, width, vocabulary = TINY_HEAD if figures.tiny else HEAD
    device = figures.device
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    backend: Backend = "triton" if device.type == "cuda" else "torch"
    ours = partial(linear_cross_entropy, backend=backend)

    def both(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, float]:
        call = Call(lambda _: torch.autograd.grad(loss(x, weight, targets), (x, weight)))
        return timed(figures.clock.times(call))

    figures.measure("products alone", lambda: timed(figures.clock.times(Call(lambda _: _products(x, weight)))))
    figures.measure("megalite", lambda: both(ours))
    figures.measure("eager", lambda: both(_plain_loss))
    needs = 0.0 if figures.tiny else COMPILE_SECONDS
    figures.measure("torch.compile", lambda: both(compile_for(device, _plain_loss, fullgraph=True)), needs)


def _plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.T).float(), targets, reduction="sum")


@torch.no_grad()
def _products(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The products of forward and backward, with logits in place of their gradient."""
    logits = x @ weight.T
    return logits @ weight, logits.T @ x


def optimizer(figures: Figures) -> None:
    """Time a step of AdamW over the parameters of a model in fp32, in ms per 1e9 parameters."""
    device = figures.device
    free = figures.clock.free()
    model = TINY_MODEL if figures.tiny or free is None else fitting(PARAMETERS, free)
    sizes = model.parameters()
    weights = [torch.randn(size, device=device) for size in sizes]
    gradients = [torch.randn_like(weight) for weight in weights]
    elements = sum(weight.numel() for weight in weights)
    for name, fused in {"torch, fused": True, "torch, foreach": False}.items():
        figures.measure(name, partial(_torch_adamw, figures, weights, gradients, fused, elements))
    figures.measure("megalite", partial(_our_adamw, figures, weights, gradients, [], elements))
    narrow = [weight.bfloat16() for weight in weights]
    name = "megalite, bf16 gradients and copies of weights"
    figures.measure(name, lambda: _our_adamw(figures, weights, [g.bfloat16() for g in gradients], narrow, elements))


def _torch_adamw(
    figures: Figures, weights: list[Tensor], gradients: list[Tensor], fused: bool, elements: int
) -> dict[str, float]:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    step = torch.optim.AdamW(weights, **ADAMW, fused=fused, foreach=not fused).step
    return _per_billion(figures, lambda: step(), elements)


def _our_adamw(
    figures: Figures, weights: list[Tensor], gradients: list[Tensor], copies: list[Tensor], elements: int
) -> dict[str, float]:
    firsts, seconds = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    steps = [torch.zeros((), device=figures.device) for _ in weights]
    backend: Backend = "triton" if figures.device.type == "cuda" else "torch"
    step = partial(adamw, weights, gradients, firsts, seconds, steps, copies=copies, **ADAMW, backend=backend)
    return _per_billion(figures, step, elements)


def _per_billion(figures: Figures, step: Callable[[], Any], elements: int) -> dict[str, float]:
    times = figures.clock.times(Call(lambda _: step()))
    return timed(times, ms_per_billion=times.median * 1e3 / elements * 1e9)
