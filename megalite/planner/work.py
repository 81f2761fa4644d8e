"""What one step of training has to do: the model's sizes, the layout, and the batch. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
DataMode = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Work:
    """Sizes of a decoder, how it is spread over ranks, and what a step trains on.

    gated: the MLP has three matrices instead of two. tied: the output layer uses the embedding's matrix. virtual:
    stages of a pipeline rank. dp: data-parallel ranks. shards: of them, those that zero3 shards over, if not
    all; the others have the same. micro: sequences of a micro-batch. micro_batches: of a step and
    a data-parallel rank. precision: of matrix products.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    cp: int = 1
    dp: int = 1
    shards: int | None = None
    mode: DataMode = "zero3"
    micro: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    precision: Literal["bf16", "fp8", "fp32", "fp64"] = "bf16"
    window: int | None = None
    method: Literal["ring", "ulysses", "all_gather"] = "ring"

    @property
    def element(self) -> int:
        """Bytes of an activation's element, and of a weight's in a matrix product."""
        return {"fp32": 4, "fp64": 8}.get(self.precision, 2)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro * self.sequence // self.cp

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer's matrices."""
        return self.width * (2 * self.q + 2 * self.k + (3 if self.gated else 2) * self.ffn)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all ranks."""
        return self.micro * self.micro_batches * self.dp * self.sequence
