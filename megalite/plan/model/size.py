"""Number of parameters of a model, and of floating-point operations that a token costs.

L layers, q features of all query heads, s sequence length.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Literal, TypeVar

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.model_schema import Model
from megalite.plan.model.weights import embedding, embedding_weights, head, head_weights, layer_weights, weights
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import RoleKind, Side

Attention = Literal["causal", "full"]
T = TypeVar("T")


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by component; biases count with their matrix, query and key norms with the norms."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    norms: int = 0
    mtp: int = 0
    head: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())  # astuple copies deeply, and plans ask often

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Parameters":
        return Parameters(*(number * times for number in astuple(self)))

    @staticmethod
    def of(weights: Iterable[Weight], count: Callable[[Weight], int] = attrgetter("elements")) -> "Parameters":
        """Count the parameters of `weights` by component, or sum another `count` of each weight."""
        found = Counter[str]()
        for weight in weights:
            found[weight.role.component] += count(weight)
        return Parameters(**found)


def layer_parameters(model: Model, kind: LayerKind) -> Parameters:
    """Parameters of one decoder layer."""
    return Parameters.of(weight for _, weight in layer_weights(model, kind))


def model_parameters(model: Model) -> Parameters:
    """Parameters of the whole model; a head that uses the embedding's weight has none of its own."""
    (alone,) = stage_parameters(model, [model.layers + model.depth])
    return alone


def active_parameters(model: Model) -> Parameters:
    """Parameters of the whole model without the experts that a token does not choose; all of the embedding count."""
    return Parameters.of(weights(model).values(), attrgetter("active"))


def trained_parameters(model: Model) -> Parameters:
    """Parameters of the whole model that training changes."""
    return Parameters.of(weight for weight in weights(model).values() if weight.trained)


def stage_parameters(model: Model, split: Sequence[int]) -> list[Parameters]:
    """Parameters on each pipeline stage, `split[i]` layers on stage i.

    The embedding is on the first stage, the final norm and the head on the last. In a pipeline of several stages the
    last one may have a copy of the embedding's weight: it counts as the head if that is tied, else as the embedding.
    """
    last = len(split) - 1
    found = [_of_layers(model, kinds) for kinds in by_stage(layer_kinds(model), split)]
    found[0] += Parameters.of(embedding_weights(model).values())
    copy = [head(model) if model.tie_embeddings else embedding(model)] if model.shares_embedding and last else []
    found[last] += Parameters.of([*head_weights(model).values(), *copy])
    return found


def _of_layers(model: Model, kinds: Sequence[LayerKind]) -> Parameters:
    return sum((layer_parameters(model, kind) * count for kind, count in Counter(kinds).items()), Parameters())


def by_stage(kinds: Sequence[T], split: Sequence[int]) -> list[Sequence[T]]:
    """By stage: the entries of its layers. kinds: one entry for each layer of the model, first to last."""
    return [kinds[end - count : end] for end, count in zip(accumulate(split), split, strict=True)]


def layer_forward_flops(model: Model, kind: LayerKind, attention: Attention = "causal") -> int:
    """Floating-point operations of one layer's forward pass, per token.

    Each weight of a matrix takes 2. Attention scores and values take 4·q·s with full attention, and half of that with
    causal attention. With a window of n tokens they take 4·q·n, and with causal attention 4·q·(n - n²/2s).
    """
    s, scores = model.sequence_length, 0
    for heads in (part.heads for part in Layer(model.width, kind).parts if part.heads is not None):
        n = heads.scores.window_in(s) or s
        pairs = 2 * (heads.queries + heads.outputs) * n
        scores += pairs * (2 * s - n) // (2 * s) if attention == "causal" else pairs
    return layer_matrix_flops(model, kind) + scores


def layer_matrix_flops(model: Model, kind: LayerKind) -> int:
    """Floating-point operations per token of the matrix products with weights in one layer's forward pass."""
    return round(sum(product.flops for product in Layer(model.width, kind).products(1, 1)))


def layer_weight_flops(model: Model, kind: LayerKind) -> int:
    """Floating-point operations per token of the gradients of one layer's matrices, those that are trained."""
    matrices = (weight for _, weight in layer_weights(model, kind) if weight.role.kind is RoleKind.MATRIX)
    return sum(2 * weight.active for weight in matrices if weight.trained)


def head_forward_flops(model: Model) -> int:
    """Floating-point operations of the output layer's forward passes, per token: one for each token predicted."""
    return (1 + model.depth) * sum(2 * weight.elements for weight in _head_matrices(model))


def head_weight_flops(model: Model) -> int:
    """Floating-point operations of the gradients of the output layer's weights that are trained, per token."""
    return (1 + model.depth) * sum(2 * weight.elements for weight in _head_matrices(model) if weight.trained)


def _head_matrices(model: Model) -> list[Weight]:
    """The matrix that makes logits, and an adapter's factors beside it."""
    return [head(model), *(weight for weight in head_weights(model).values() if weight.role.adapts)]


def flops_per_token(model: Model, attention: Attention = "causal") -> int:
    """Floating-point operations to train on one token; backward takes twice as many as forward if all is trained.

    With L layers without windows, each weight of a matrix takes 6, the head's included, or 4 if it is not trained and
    has no gradient; of experts, only those of a token count. Attention takes 6·L·q·s (causal) or 12·L·q·s (full), q
    being the width of all query heads and s the sequence length. The embedding lookup, norms and recomputation are not
    counted (PaLM, arXiv 2204.02311, app. B); the product of an embedding's adapter is.
    """
    first = [weight for weight in embedding_weights(model).values() if weight.role.outputs is Side.ADAPTER]
    found = 2 * head_forward_flops(model) + head_weight_flops(model) + sum(6 * weight.elements for weight in first)
    for kind, count in Counter(layer_kinds(model)).items():
        whole, matrices = layer_forward_flops(model, kind, attention), layer_matrix_flops(model, kind)
        found += count * (3 * whole - matrices + layer_weight_flops(model, kind))
    return found
