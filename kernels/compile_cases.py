"""The cases that are compiled without a GPU: all kernels at the shapes of published models, on meta tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 8192  # tokens of a micro-batch


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model on which its kernels depend."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int = 128256


LLAMAS = {
    "Llama 3.2 1B": ModelShape(2048, 32, 8, 64, 8192),
    "Llama 3 8B": ModelShape(4096, 32, 8, 128, 14336),
    "Llama 3 70B": ModelShape(8192, 64, 8, 128, 28672),
    "Llama 3.1 405B": ModelShape(16384, 128, 8, 128, 53248),
}


@dataclass(frozen=True)
class MixtureShape:
    """The sizes of a model with experts on which their kernels depend."""

    width: int
    hidden: int  # hidden features of each expert
    active: int  # experts of a token

    @property
    def rows(self) -> int:
        return TOKENS * self.active


MIXTURES = {
    "Qwen3 30B-A3B": MixtureShape(2048, 768, 8),
    "gpt-oss 20B": MixtureShape(2880, 2880, 4),
    "Mixtral 8x7B": MixtureShape(4096, 14336, 2),
    "DeepSeek-V3": MixtureShape(7168, 2048, 8),
}


@dataclass(frozen=True)
class CompileCase:
    """One pass of an operation to compile.

    launch: calls the functions behind the custom ops of the pass, with tensors on the meta device.
    wide_loads: whether every kernel must load 16 bytes at a time; false if rows are too short or too few for that.
    """

    op: str
    model: str
    dtype: torch.dtype
    launch: Callable[[], object]
    wide_loads: bool = True


def models() -> Iterator[tuple[str, ModelShape, torch.dtype]]:
    """The models of the cases: all in bfloat16, and the largest also in float32, which needs the most registers."""
    for name, shape in LLAMAS.items():
        yield name, shape, torch.bfloat16
    yield name, shape, torch.float32


def mixtures() -> Iterator[tuple[str, MixtureShape, torch.dtype]]:
    """The models with experts, in the data types of `models`."""
    for name, shape in MIXTURES.items():
        yield name, shape, torch.bfloat16
    yield name, shape, torch.float32


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
