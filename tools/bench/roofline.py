"""A bound on training steps of one H100, from counted operations and bytes at rates that are assumed: a prediction.

Matrix products, attention and passes over memory run one after another, each at its rate, and nothing waits: for the
host, for a network, or for want of power. The planner (`megalite plan`) has times that fit measured runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from megalite.config.layers import layer_kinds
from megalite.config.load import load
from megalite.config.model_schema import Model
from megalite.cost.cluster import load_cluster
from megalite.cost.layer import ATTENTION_BACKWARD, LOOKUP_ELEMENTS
from megalite.cost.program import attention_shares
from megalite.plan.model.size import (
    flops_per_token,
    head_forward_flops,
    layer_forward_flops,
    layer_matrix_flops,
    model_parameters,
)
from megalite_kernels.adamw import bytes_moved as adamw_bytes
from megalite_kernels.cross_entropy import bytes_moved as loss_bytes
from megalite_kernels.grad_norm import bytes_moved as norm_bytes
from megalite_kernels.linear_cross_entropy import chunk_tokens
from megalite_tools.bench.layer_bytes import bytes_per_layer

GPU = load_cluster("h100_sxm").gpu
HALF = torch.bfloat16


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s that are assumed.

    products: of matrix products, by the model's width; head: of the output layer's. attention: the kernel, whose shares
    of the peak are the planner's. memory: of passes over it.
    """

    products: Mapping[int, float] = field(default_factory=lambda: {2048: 680e12, 3072: 710e12, 4096: 745e12})
    head: float = 720e12
    attention: Literal["cudnn", "flash3"] = "cudnn"
    memory: float = 2.8e12


ASSUMED_RATES = Rates()


@dataclass(frozen=True)
class Row:
    """A model that the table has. goal, measured: full and causal MFU in per cent; None: nobody measured it."""

    name: str
    preset: str
    settings: tuple[str, ...]
    batch: int  # sequences of a step, all in one micro-batch
    goal: tuple[float, float]
    measured: tuple[float, float] | None = None  # on one H200, docs/benchmarks/gpu/h200_2026_11_26

    @property
    def model(self) -> Model:
        return load([self.preset], self.settings).model


ROWS = (
    Row("Llama 3.2 1B", "llama3.2_1b", (), 2, (60, 51), (60.3, 51.1)),
    Row("Llama 3.2 3B", "llama3.2_3b", (), 1, (63, 53)),
    Row("Llama 3 8B, 8 layers", "llama3_8b", ("model.layers=8",), 2, (66, 60), (63.4, 57.3)),
)


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a step. attention: operations of forward; head_size: features of a head."""

    products: float
    head: float
    attention: float
    bytes: float
    width: int
    head_size: int

    def seconds(self, rates: Rates = ASSUMED_RATES) -> float:
        """The time of a step in which nothing waits."""
        there, back = (
            share * GPU.peak["bf16"] for share in attention_shares(rates.attention, GPU.name, self.head_size)
        )
        attention = self.attention / there + ATTENTION_BACKWARD * self.attention / back
        products = self.products / rates.products[self.width] + self.head / rates.head
        return products + attention + self.bytes / rates.memory


def work_of(row: Row) -> Work:
    """Operations and bytes of a step in bf16 on one rank. Needs a process group."""
    model = row.model
    tokens = row.batch * model.sequence_length
    products = attention = 0
    for kind in layer_kinds(model):
        matrices = layer_matrix_flops(model, kind)
        products, attention = products + 3 * matrices, attention + layer_forward_flops(model, kind) - matrices
    (kind,) = set(layer_kinds(model))
    return Work(
        products=tokens * products,
        head=3 * tokens * head_forward_flops(model),
        attention=tokens * attention,
        bytes=sum(bytes_of(row).values()),
        width=model.width,
        head_size=kind.attention.heads.width,
    )


def bytes_of(row: Row) -> dict[str, float]:
    """Bytes of a step beside matrix products and attention, by what moves them. Needs a process group."""
    model = row.model
    tokens, parameters = row.batch * model.sequence_length, model_parameters(model).total
    chunks = -(-tokens // chunk_tokens(tokens, model.width, model.vocab_size, HALF))
    return {
        "layers": tokens * model.layers * bytes_per_layer(row.preset, *row.settings).total(),
        "loss": sum(loss_bytes(tokens, model.vocab_size, HALF)),
        "sums of the head's gradient": 2 * 4 * (chunks - 1) * model.vocab_size * model.width,
        "embedding": LOOKUP_ELEMENTS * HALF.itemsize * tokens * model.width,
        "norm of gradients": norm_bytes(parameters, torch.float32)[0],
        "optimizer": adamw_bytes(parameters, copy=HALF)[0],
    }


def mfu(row: Row, seconds: float) -> tuple[float, float]:
    """Model FLOPs utilization in per cent: attention counted in full, and as the causal half."""
    rate = row.batch * row.model.sequence_length / seconds / GPU.peak["bf16"]
    full, causal = (100 * rate * flops_per_token(row.model, kind) for kind in ("full", "causal"))
    return full, causal


def roofline_table() -> list[tuple[str, ...]]:
    """Rows of docs/speed.md: a model, its milliseconds and MFU by kernel of attention, the goal, and what was measured.

    Needs a process group.
    """
    found = []
    for row in ROWS:
        work = work_of(row)
        each = [work.seconds(rates) for rates in (ASSUMED_RATES, Rates(attention="flash3"))]
        cells = [cell for seconds in each for cell in (f"{1e3 * seconds:.0f}", _pair(mfu(row, seconds)))]
        measured = _pair(row.measured) if row.measured else ""
        found.append((f"{row.name}, {row.batch} × {row.model.sequence_length:,}", *cells, _pair(row.goal), measured))
    return found


def _pair(shares: tuple[float, float]) -> str:
    return " / ".join(f"{share:.1f}" for share in shares)
