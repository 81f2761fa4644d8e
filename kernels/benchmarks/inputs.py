"""The tensors that an op is measured with: random, but the same every time, at the sizes of a model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.compile_cases import LLAMAS, TOKENS, ModelShape
from megalite_kernels.float8 import ACTIVATION, amax, scale_for
from megalite_kernels.mxfp8 import BLOCK as MX_BLOCK
from megalite_kernels.nf4 import BLOCK, quantize_nf4

STEP = 10  # updates that the optimizer has made before
EXPERTS, ACTIVE = 64, 8  # in place of a feed-forward: those of a token are together as wide


@dataclass(frozen=True)
class Model:
    """A model, and what of it one rank holds."""

    name: str
    shape: ModelShape
    tokens: int  # tokens of a micro-batch
    columns: int  # classes whose logits are here
    layers: int  # whose parameters are here
    ranks: int  # among which each parameter is split

    @property
    def elements(self) -> int:
        """Number of elements of all parameters on this rank."""
        return sum(math.prod(size) for size in self.parameters())

    @property
    def routed(self) -> tuple[int, int]:
        """Rows of all experts, and hidden features of one."""
        return ACTIVE * self.tokens, self.shape.ffn // ACTIVE

    def parameters(self) -> list[tuple[int, ...]]:
        """Sizes of this rank's parts, split by rows; both ends of the model are here."""
        width, ffn, vocabulary = self.shape.width, self.shape.ffn, self.shape.vocabulary
        q, kv = self.shape.heads * self.shape.head_size, self.shape.kv_heads * self.shape.head_size
        layer = [(width,), (q, width), (kv, width), (kv, width), (width, q)]
        layer += [(width,), (ffn, width), (ffn, width), (width, ffn)]
        whole = [(vocabulary, width), *layer * self.layers, (width,), (vocabulary, width)]
        return [(-(-rows // self.ranks), *columns) for rows, *columns in whole]

    def matrices(self) -> list[tuple[int, ...]]:
        """Sizes of this rank's parts of the layers' matrices."""
        return [size for size in self.parameters()[1:-1] if len(size) == 2]


# One rank's part of the states: of 8B, all layers on 8 ranks; of 70B, a fifth of them, on 16.
MODELS = {
    "8B": Model("8B", LLAMAS["Llama 3 8B"], TOKENS, columns=128256, layers=32, ranks=8),
    "70B": Model("70B", LLAMAS["Llama 3 70B"], TOKENS, columns=128256 // 8, layers=16, ranks=16),
}
MAX_RANKS = 4096
STATE_BYTES = 64  # bytes that comparing and timing AdamW takes for every element
TINY_MODEL = Model("tiny", ModelShape(48, 3, 1, 16, 80, 72), 11, columns=70, layers=1, ranks=1)


def fitting(model: Model, memory: int) -> Model:
    """Split the model's parameters among more ranks until AdamW takes at most `memory` bytes."""
    while model.elements * STATE_BYTES > memory and model.ranks < MAX_RANKS:
        model = replace(model, ranks=2 * model.ranks)
    return model


@dataclass
class Inputs:
    """Arguments of an op: leaves, of which gradients are wanted, then constants; and gradients of its results."""

    leaves: Mapping[str, Tensor]
    constants: Sequence[Any]  # tensors; lists of tensors for ops that take many at once
    grads: Sequence[Tensor]

    def __post_init__(self) -> None:
        self._before = [tensor.clone() for tensor in self._tensors()]
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.leaves.values(), *self.constants

    @property
    def device(self) -> torch.device:
        return self._before[0].device

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what an implementation has overwritten."""
        for tensor, before in zip(self._tensors(), self._before, strict=True):
            tensor.copy_(before)

    def _tensors(self) -> list[Tensor]:
        return flat((*self.arguments, *self.grads))


def flat(results: Any) -> list[Tensor]:
    """All tensors of a tensor or of nested sequences of them."""
    return [results] if isinstance(results, Tensor) else [tensor for part in results for tensor in flat(part)]


class Random:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        wide = torch.randn(size, generator=self.generator, device=self.device)
        return wide.mul_(scale).add_(mean).to(dtype)

    def weight(self, width: int) -> Tensor:
        """Return the weight of a norm."""
        return self.normal(width, scale=0.1, mean=1)

    def below(self, limit: int, count: int) -> Tensor:
        return torch.randint(limit, (count,), generator=self.generator, device=self.device)


def norm_inputs(model: Model, random: Random) -> Inputs:
    size = model.tokens, model.shape.width
    leaves = {"x": random.normal(*size), "weight": random.weight(size[1])}
    return Inputs(leaves, (), [random.normal(*size)])


def add_norm_inputs(model: Model, random: Random) -> Inputs:
    size = model.tokens, model.shape.width
    leaves = {"x": random.normal(*size), "y": random.normal(*size), "weight": random.weight(size[1])}
    return Inputs(leaves, (), [random.normal(*size), random.normal(*size)])


def swiglu_inputs(model: Model, random: Random) -> Inputs:
    size = model.tokens, model.shape.ffn
    leaves = {"gate": random.normal(*size), "up": random.normal(*size)}
    return Inputs(leaves, (), [random.normal(*size)])


def weighted_swiglu_inputs(model: Model, random: Random) -> Inputs:
    leaves = {name: random.normal(*model.routed) for name in ("gate", "up")}
    scores = random.normal(model.routed[0], dtype=torch.float32)
    return Inputs({**leaves, "scores": scores}, (), [random.normal(*model.routed)])


def spread_inputs(model: Model, random: Random) -> Inputs:
    x, grad = random.normal(model.tokens, model.shape.width), random.normal(model.routed[0], model.shape.width)
    return Inputs({"x": x}, _routes(model, random), [grad])


def collect_inputs(model: Model, random: Random) -> Inputs:
    rows, grad = random.normal(model.routed[0], model.shape.width), random.normal(model.tokens, model.shape.width)
    return Inputs({"rows": rows}, _routes(model, random), [grad])


def _routes(model: Model, random: Random) -> tuple[Tensor, Tensor]:
    """Places of every token's rows among those of all experts, and the token of every row."""
    experts = random.normal(model.tokens, EXPERTS, dtype=torch.float32).topk(ACTIVE).indices
    order = experts.flatten().argsort(stable=True)
    return order.argsort().view(-1, ACTIVE), order // ACTIVE


def float8_inputs(model: Model, random: Random, rowwise: bool = False) -> Inputs:
    """An input of a product, and its scales by rows and by columns, which without `rowwise` are one."""
    x = random.normal(model.tokens, model.shape.ffn)
    return Inputs({}, [x, *(scale_for(amax(x, dim), ACTIVATION) for dim in ((-1, 0) if rowwise else (None, None)))], ())


def mxfp8_inputs(model: Model, random: Random) -> Inputs:
    """An input of a product."""
    return Inputs({}, [random.normal(*mxfp8_size(model))], ())


def mxfp8_size(model: Model) -> tuple[int, int]:
    """The sizes of an input of a down projection, rounded up to whole blocks."""
    tokens, hidden = (-(-size // MX_BLOCK) * MX_BLOCK for size in (model.tokens, model.shape.ffn))
    return tokens, hidden


def nf4_inputs(model: Model, random: Random) -> Inputs:
    """The bytes of a weight in four bits."""
    return Inputs({}, [quantize_nf4(random.normal(*nf4_size(model)))], ())


def nf4_size(model: Model) -> tuple[int, int]:
    """The sizes of an up projection, whose rows are rounded up to whole blocks."""
    return model.shape.ffn, -(-model.shape.width // BLOCK) * BLOCK


def rope_inputs(model: Model, random: Random) -> Inputs:
    """Queries and keys `[s, 1, h, e]`; float32 tables of their angles."""
    leaves = _heads(model, random)
    return Inputs(leaves, _angles(model, random.device), [random.normal(*leaf.shape) for leaf in leaves.values()])


def qk_norm_inputs(model: Model, random: Random) -> Inputs:
    heads = _heads(model, random)
    weights = {f"weight of {name}": random.weight(model.shape.head_size) for name in heads}
    grads = [random.normal(*leaf.shape) for leaf in heads.values()]
    return Inputs({**heads, **weights}, _angles(model, random.device), grads)


def _heads(model: Model, random: Random) -> dict[str, Tensor]:
    heads = {"q": model.shape.heads, "k": model.shape.kv_heads}
    return {name: random.normal(model.tokens, 1, count, model.shape.head_size) for name, count in heads.items()}


def _angles(model: Model, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 500000.0 ** (-torch.arange(0, model.shape.head_size, 2, device=device) / model.shape.head_size)
    angles = torch.arange(model.tokens, device=device)[:, None, None, None] * frequencies
    return angles.cos(), angles.sin()


def cross_entropy_inputs(model: Model, random: Random) -> Inputs:
    """Logits that spread enough for wrong probabilities to show beside the one-hot part of the gradient."""
    logits = random.normal(model.tokens, model.columns, scale=2)
    targets = random.below(model.columns, model.tokens)
    return Inputs({"logits": logits}, [targets], [torch.ones((), device=random.device)])


def linear_inputs(model: Model, random: Random) -> Inputs:
    width = model.shape.width
    weight = random.normal(model.columns, width, scale=2 * width**-0.5)
    leaves = {"x": random.normal(model.tokens, width), "weight": weight}
    targets = random.below(model.columns, model.tokens)
    return Inputs(leaves, [targets], [torch.ones((), device=random.device)])


def optimizer_inputs(model: Model, random: Random) -> Inputs:
    """Weights, gradients, first and second moments, counts of updates; steps are of the size of those in training."""
    sizes = model.parameters()
    weights, grads, firsts, seconds = (
        [random.normal(*size, scale=scale, dtype=torch.float32) for size in sizes] for scale in (0.02, 1e-3, 1e-3, 1e-3)
    )
    steps = [torch.full((), float(STEP), device=random.device) for _ in sizes]
    return Inputs({}, [weights, grads, firsts, [second.square_().add_(1e-7) for second in seconds], steps], ())


def muon_inputs(model: Model, random: Random) -> Inputs:
    """Weights, gradients and averages of matrices, and updates that are made orthogonal: of Frobenius norm √rows."""
    sizes = model.matrices()
    weights, grads, averages = (
        [random.normal(*size, scale=scale, dtype=torch.float32) for size in sizes] for scale in (0.02, 1e-3, 1e-3)
    )
    updates = [random.normal(*size, scale=max(size) ** -0.5) for size in sizes]
    return Inputs({}, [weights, grads, averages, updates], ())


def product_inputs(model: Model, random: Random) -> Inputs:
    return Inputs({}, [random.normal(model.shape.width, model.shape.ffn, scale=model.shape.ffn**-0.5)], ())


def gradient_inputs(model: Model, random: Random) -> Inputs:
    return Inputs({}, [[random.normal(*size, dtype=torch.float32) for size in model.parameters()]], ())
