"""How many parameters a model has, and how many floating-point operations a token costs.

h width, L layers, q heads · head size, k kv_heads · head size, f ffn, s sequence length, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from megalite.config.schema import Model

Attention = Literal["causal", "full"]


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by component; biases count with their matrix, query and key norms with the norms."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    norms: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())  # astuple copies deeply, and plans ask often

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Parameters":
        return Parameters(*(number * times for number in astuple(self)))


def layer_parameters(model: Model) -> Parameters:
    """Parameters of one decoder layer."""
    q, k = _query_width(model), model.kv_heads * model.head_size
    return Parameters(
        attention=_attention_weights(model) + (q + 2 * k) * model.qkv_bias,
        mlp=_mlp_weights(model),
        norms=2 * model.width + 2 * model.head_size * model.qk_norm,
    )


def model_parameters(model: Model) -> Parameters:
    """Parameters of the whole model; a head that uses the embedding's weight has none of its own."""
    matrix = model.vocab_size * model.width
    ends = Parameters(embedding=matrix, norms=model.width, head=0 if model.tie_embeddings else matrix)
    return layer_parameters(model) * model.layers + ends


def stage_parameters(model: Model, split: Sequence[int]) -> list[Parameters]:
    """Parameters on each pipeline stage, `split[i]` layers on stage i.

    The embedding is on the first stage, the final norm and the head on the last. In a pipeline of several
    stages a tied head is counted: the last stage holds a copy of the embedding's weight.
    """
    matrix = model.vocab_size * model.width
    last = len(split) - 1
    shares_weight = model.tie_embeddings and last == 0
    layer = layer_parameters(model)
    sizes = {count: layer * count for count in set(split)}
    found = [sizes[count] for count in split]
    found[0] += Parameters(embedding=matrix)
    found[last] += Parameters(norms=model.width, head=0 if shares_weight else matrix)
    return found


def layer_forward_flops(model: Model, attention: Attention = "causal") -> int:
    """Floating-point operations of one layer's forward pass, per token.

    2 for each weight of a matrix, and for attention scores and values 4·q·s with full attention, half of
    that with causal.
    """
    scores = 4 * _query_width(model) * model.sequence_length
    return 2 * (_attention_weights(model) + _mlp_weights(model)) + (scores if attention == "full" else scores // 2)


def head_forward_flops(model: Model) -> int:
    """Floating-point operations of the output layer's forward pass, per token."""
    return 2 * model.vocab_size * model.width


def flops_per_token(model: Model, attention: Attention = "causal") -> int:
    """Floating-point operations to train on one token: backward costs twice forward.

    That is 6 for each weight of a matrix, the head's included, plus 6·L·q·s (causal) or 12·L·q·s (full) for
    attention. The embedding lookup, norms and recomputation are not counted (PaLM, arXiv 2204.02311, app. B).
    """
    return 3 * (model.layers * layer_forward_flops(model, attention) + head_forward_flops(model))


def _query_width(model: Model) -> int:
    return model.heads * model.head_size


def _attention_weights(model: Model) -> int:
    q, k = _query_width(model), model.kv_heads * model.head_size
    return model.width * (q + 2 * k) + q * model.width


def _mlp_weights(model: Model) -> int:
    return 3 * model.width * model.ffn
