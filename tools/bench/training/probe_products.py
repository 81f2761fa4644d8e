"""Matrix products of the probe: the best square one, and those of linear layers at the sizes of published models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megalite_kernels.benchmarks.timing import Call
from megalite_kernels.compile_cases import LLAMAS, ModelShape
from megalite_tools.bench.training.probe_device import ask_smi, number
from megalite_tools.bench.training.probe_figures import OMISSION, Figures, digits, timed

Kind = Literal["forward", "input gradient", "weight gradient"]
Run = Callable[[], Tensor]

SUSTAINED_SECONDS = 3.0  # nvidia-smi tells the mean power of a second
LOAD_COLUMNS = {"clocks.sm": "mhz", "power.draw": "watts", "temperature.gpu": "celsius"}
FP8_CAPABILITY = (8, 9)  # the least compute capability with fp8 products
MODELS = {  # and the tokens of a micro-batch; the sizes of 3B are those of configs/model/llama3.2_3b.yaml
    "Llama 3.2 1B": (LLAMAS["Llama 3.2 1B"], 16384),
    "Llama 3.2 3B": (ModelShape(3072, 24, 8, 128, 8192), 8192),
    "Llama 3 8B": (LLAMAS["Llama 3 8B"], 16384),
}
TINY_MODELS = {"tiny": (ModelShape(64, 4, 2, 16, 96, 128), 32)}


@dataclass(frozen=True)
class LinearProduct:
    """A linear layer of weight W `[columns, depth]` on x `[rows, depth]`: x·Wᵀ, or one of its gradients."""

    rows: int
    columns: int
    depth: int
    kind: Kind = "forward"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    def run(self, device: torch.device, dtype: torch.dtype) -> Run:
        """Multiply random normal numbers: with zeros, a GPU takes less power and seems faster."""
        normal = partial(torch.randn, device=device, dtype=dtype)
        if self.kind == "forward":
            x, w = normal(self.rows, self.depth), normal(self.columns, self.depth)
            return lambda: x @ w.T
        dy = normal(self.rows, self.columns)
        if self.kind == "input gradient":
            w = normal(self.columns, self.depth)
            return lambda: dy @ w
        x = normal(self.rows, self.depth)
        return lambda: dy.T @ x

    def run_fp8(self, device: torch.device, fast: bool) -> Run:
        """Multiply with one scale per tensor. The left factor has whole rows and the right one whole columns."""
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
        x = normal(self.rows, self.depth).to(torch.float8_e4m3fn)
        w = normal(self.columns, self.depth).to(torch.float8_e4m3fn)
        scale = torch.ones((), dtype=torch.float32, device=device)
        return lambda: torch._scaled_mm(x, w.T, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def linears(shape: ModelShape, rows: int) -> dict[str, LinearProduct]:
    """Products of a layer, apart and joined as one product of all weights with the same input, and of the head."""
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return {
        "q": LinearProduct(rows, q, shape.width),
        "k": LinearProduct(rows, kv, shape.width),
        "qkv": LinearProduct(rows, q + 2 * kv, shape.width),
        "out": LinearProduct(rows, shape.width, q),
        "gate": LinearProduct(rows, shape.ffn, shape.width),
        "gate and up": LinearProduct(rows, 2 * shape.ffn, shape.width),
        "down": LinearProduct(rows, shape.width, shape.ffn),
        "head": LinearProduct(rows, shape.vocabulary, shape.width),
    }


def gemm(figures: Figures) -> None:
    """Time products in bf16, fp8 and fp32."""
    square = LinearProduct(*(64,) * 3) if figures.tiny else LinearProduct(*(8192,) * 3)
    models = TINY_MODELS if figures.tiny else MODELS
    figures.measure("square", partial(_bf16, figures, square))
    figures.measure("square, sustained", partial(_sustained, figures, square))
    for model, (shape, tokens) in models.items():
        for name, product in linears(shape, tokens).items():
            figures.measure(f"{model}, {name}", partial(_bf16, figures, product))
    model, (shape, tokens) = list(models.items())[-1]  # the largest model
    gate = linears(shape, tokens)["gate"]
    kinds: tuple[Kind, ...] = ("input gradient", "weight gradient")
    for kind in kinds:
        product = LinearProduct(gate.rows, gate.columns, gate.depth, kind)
        figures.measure(f"{model}, gate, {kind}", partial(_bf16, figures, product))
    for name, product, fast in _fp8_products(square, models):
        figures.measure(name, partial(_fp8, figures, product, fast))
    for precision in ("fp32", "tf32"):
        figures.measure(f"{model}, out, {precision}", partial(_fp32, figures, linears(shape, tokens)["out"], precision))


def _fp8_products(
    square: LinearProduct, models: dict[str, tuple[ModelShape, int]]
) -> list[tuple[str, LinearProduct, bool]]:
    found = [("square, fp8", square, True), ("square, fp8, sums in fp32", square, False)]
    for model, (shape, tokens) in models.items():
        products = linears(shape, tokens)
        found += [(f"{model}, {name}, fp8", products[name], True) for name in ("out", "gate", "down")]
    return found


def _bf16(figures: Figures, product: LinearProduct) -> dict[str, Any]:
    return _measured(figures, product, "bf16", product.run(figures.device, torch.bfloat16))


def _fp8(figures: Figures, product: LinearProduct, fast: bool) -> dict[str, Any]:
    if figures.device.type == "cuda" and torch.cuda.get_device_capability(figures.device) < FP8_CAPABILITY:
        return {OMISSION: "the GPU has no fp8"}
    return _measured(figures, product, "fp8", product.run_fp8(figures.device, fast))


def _fp32(figures: Figures, product: LinearProduct, precision: str) -> dict[str, Any]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return _measured(figures, product, precision, product.run(figures.device, torch.float32))
    finally:
        torch.set_float32_matmul_precision(before)


def _measured(figures: Figures, product: LinearProduct, precision: str, run: Run) -> dict[str, Any]:
    times = figures.clock.times(Call(lambda _: run()))
    sizes = [product.rows, product.columns, product.depth]
    return {"precision": precision, "sizes": sizes, **timed(times, tflops=product.flops / times.median / 1e12)}


def _sustained(figures: Figures, product: LinearProduct) -> dict[str, Any]:
    """A product again and again; clocks and power while it runs."""
    run = product.run(figures.device, torch.bfloat16)
    each = figures.clock.times(Call(lambda _: run())).median
    now: dict[str, Any] = {}
    seconds = figures.clock.sustained(
        run,
        each,
        each if figures.tiny else SUSTAINED_SECONDS,
        lambda: now.update(ask_smi(figures.device, tuple(LOAD_COLUMNS))),
    )
    rates = {"ms": digits(seconds * 1e3), "tflops": digits(product.flops / seconds / 1e12)}
    return {"precision": "bf16", **rates, **{LOAD_COLUMNS[column]: number(value) for column, value in now.items()}}
