"""Roles of parameters. Code that treats parameters differently asks for their role, never for a name or a shape."""

from dataclasses import dataclass, replace
from enum import Enum


class RoleKind(Enum):
    """The part that a parameter plays in the model."""

    EMBEDDING = "embedding"  # one row for every token; tied embeddings are the head's weight too
    HEAD = "head"  # from the residual stream to logits
    MATRIX = "matrix"  # inside of a layer
    NORM = "norm"  # the factors of a norm
    BIAS = "bias"  # begins as 0; sinks are among them
    MAGNITUDE = "magnitude"  # an adapter's term of the norms of a matrix's rows; begins as 0
    STATE = "state"  # no parameter: something that a layer remembers from step to step; begins as 0


class Side(Enum):
    """Features that a dimension of a parameter counts."""

    STREAM = "stream"  # features of the residual stream, model.width
    STREAM_AND_TOKEN = "stream and token"  # these, after the features of a token's embedding
    QUERY_HEADS = "query heads"
    QUERIES = "queries"  # features of all query heads
    KEYS = "keys"  # features of all key-value heads
    ONE_HEAD = "one head"  # features of any single head
    LATENT = "latent"  # features of which queries, or keys and values, are made
    FEED_FORWARD = "feed-forward"  # hidden features, model.ffn
    EXPERTS = "experts"  # experts of a layer
    VOCABULARY = "vocabulary"
    ADAPTER = "adapter"  # features between the two factors of an adapter


SPLIT = frozenset((Side.QUERY_HEADS, Side.QUERIES, Side.KEYS, Side.FEED_FORWARD, Side.VOCABULARY))  # over tp


@dataclass(frozen=True)
class Role:
    """The role of a matrix `[outputs, inputs]`, or of a vector `[outputs]`; of each expert, or of the whole layer."""

    kind: RoleKind
    outputs: Side
    inputs: Side | None = None  # None: a vector
    in_layer: bool = True  # False: before the first layer, or after the last
    of_expert: bool = False  # every expert of the layer has one

    @property
    def decays(self) -> bool:
        """Flag: weight decay applies, as to matrices, not to norms and biases."""
        return self.inputs is not None

    @property
    def split(self) -> bool:
        """Flag: tensor parallelism splits the parameter, along a side whose features it divides."""
        return not self.of_expert and not SPLIT.isdisjoint((self.outputs, self.inputs))

    @property
    def copied(self) -> bool:
        """Flag: ranks of tensor parallelism have copies of the parameter, each with a part of its gradient."""
        return not self.split and not self.of_expert

    @property
    def into_stream(self) -> bool:
        """Flag: the parameter is a projection whose output a layer adds to the residual stream."""
        adds = self.inputs is not Side.STREAM_AND_TOKEN
        return self.kind is RoleKind.MATRIX and self.outputs is Side.STREAM and adds

    @property
    def fits_four_bits(self) -> bool:
        """Flag: the parameter may be kept in four bits, as matrices of layers but those that choose experts may."""
        return self.kind is RoleKind.MATRIX and self.outputs is not Side.EXPERTS

    @property
    def adapts(self) -> bool:
        """Flag: the parameter is an adapter's."""
        return Side.ADAPTER in (self.outputs, self.inputs) or self.kind is RoleKind.MAGNITUDE

    @property
    def bias(self) -> "Role":
        """The role of the bias that is added to the outputs of this matrix."""
        return Role(RoleKind.BIAS, self.outputs, of_expert=self.of_expert)

    @property
    def magnitude(self) -> "Role":
        """The role of what an adapter adds to the norms of this matrix's rows."""
        return replace(self.bias, kind=RoleKind.MAGNITUDE)

    @property
    def component(self) -> str:
        """The component of the model with which the parameter is counted; a bias counts with its matrix."""
        if self.adapts:
            return "adapters"
        if self.kind in (RoleKind.EMBEDDING, RoleKind.HEAD):
            return self.kind.value
        if self.kind is RoleKind.NORM:
            return "norms"
        if self.inputs is Side.STREAM_AND_TOKEN:
            return "mtp"
        of_mlp = self.of_expert or {self.outputs, self.inputs} & {Side.FEED_FORWARD, Side.EXPERTS}
        return "mlp" if of_mlp else "attention"


EMBEDDING = Role(RoleKind.EMBEDDING, Side.VOCABULARY, Side.STREAM, in_layer=False)
HEAD = Role(RoleKind.HEAD, Side.VOCABULARY, Side.STREAM, in_layer=False)
FINAL_NORM = Role(RoleKind.NORM, Side.STREAM, in_layer=False)
NORM = Role(RoleKind.NORM, Side.STREAM)
HEAD_NORM = Role(RoleKind.NORM, Side.ONE_HEAD)
QUERY_NORM = Role(RoleKind.NORM, Side.QUERIES)  # norm of all heads together
KEY_NORM = Role(RoleKind.NORM, Side.KEYS)
QUERY = Role(RoleKind.MATRIX, Side.QUERIES, Side.STREAM)
KEY = VALUE = Role(RoleKind.MATRIX, Side.KEYS, Side.STREAM)
SINKS = Role(RoleKind.BIAS, Side.QUERY_HEADS)
LATENT = Role(RoleKind.MATRIX, Side.LATENT, Side.STREAM)
LATENT_NORM = Role(RoleKind.NORM, Side.LATENT)
SHARED_KEY = Role(RoleKind.MATRIX, Side.ONE_HEAD, Side.STREAM)
QUERY_OF_LATENT = Role(RoleKind.MATRIX, Side.QUERIES, Side.LATENT)
KEY_OF_LATENT = VALUE_OF_LATENT = Role(RoleKind.MATRIX, Side.KEYS, Side.LATENT)
ATTENTION_OUTPUT = Role(RoleKind.MATRIX, Side.STREAM, Side.QUERIES)
GATE = UP_PROJECTION = Role(RoleKind.MATRIX, Side.FEED_FORWARD, Side.STREAM)
DOWN_PROJECTION = Role(RoleKind.MATRIX, Side.STREAM, Side.FEED_FORWARD)
ROUTER = Role(RoleKind.MATRIX, Side.EXPERTS, Side.STREAM)
CORRECTION = Role(RoleKind.STATE, Side.EXPERTS)
EXPERT_GATE = EXPERT_UP = replace(GATE, of_expert=True)
MTP_PROJECTION = Role(RoleKind.MATRIX, Side.STREAM, Side.STREAM_AND_TOKEN)
EXPERT_DOWN = replace(DOWN_PROJECTION, of_expert=True)
