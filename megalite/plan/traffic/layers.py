"""Transfers inside of embedding, layers and head, of one micro-batch: those of tensor and context parallelism.

The sizes have the letters of `plan.activations`. G is a tensor [s, b, h] gathered over tp, hwT bytes.

    phase             tp                                          cp, each layer
    forward           layer: gathers 2G, scatters 2G              keys and values arrive: ring c - 1 messages each way,
                      embedding: scatters G; head: gathers G      all_gather one gathering, ulysses two exchanges
                      head: statistics of the loss, by chunk
    recompute         full only: the same again, until all        the same again
                      that backward needs is there
    backward          conjugates of forward's; gathers again      keys and values arrive again, and their gradients,
                      what column-parallel layers take            float32 or wider, return; ulysses: two exchanges
    weight gradients  where backward is split, that gathering

A norm of all heads together sums one number per token over tp, for queries and for keys, forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.config.layers import LayerKind
from megalite.config.schema import Config
from megalite.plan.activations import Activations, chunk_tokens
from megalite.plan.model.weights import embedding_weights, head_weights
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Weight
from megalite.plan.parts.transfers import Transfers, over
from megalite.plan.recompute_modes import Mode


@dataclass(frozen=True)
class LayerTraffic:
    """The transfers of a rank at position `cp` of the context-parallel group."""

    config: Config
    cp: int

    @cached_property
    def sizes(self) -> Activations:
        return Activations(self.config)

    def embedding(self) -> tuple[Transfers, Transfers]:
        """Forward and backward of the look-up of the first stage."""
        table, *factors = embedding_weights(self.config.model).values()
        gathered = self.sizes.over_tp("all_gather", "backward: gather of the embeddings' gradient")
        return (
            self.sizes.over_tp("reduce_scatter", "forward: scatter of the embeddings")
            + self._between(factors, "reduce_scatter", "forward"),
            (gathered if table.trained else Transfers()) + self._between(factors, "all_gather", "backward"),
        )

    def _between(self, factors: Sequence[Weight], kind: str, phase: str) -> Transfers:
        """Features between the factors of the embedding or of the head, if there are any."""
        sizes = self.sizes
        if not factors or sizes.t == 1:
            return Transfers()
        size = sizes.tokens * factors[0].shape[0] * sizes.w
        return over("tp", kind, size, sizes.w, f"{phase}: features between the factors of adapters")

    def head(self) -> tuple[Transfers, Transfers]:
        """Forward and backward of the head, which makes its weight's gradient at once even if backward is split.

        With multi-token prediction: also of its look-up of embeddings, and the head has as many inputs more.
        """
        there, back = self._further()
        factors = [weight for weight in head_weights(self.config.model).values() if weight.role.adapts]
        return (
            there
            + self._of_streams("all_gather", self.sizes.predicted, "forward: gather of the head's input")
            + self._statistics()
            + self._between(factors, "all_gather", "forward"),
            back
            + self._of_streams("reduce_scatter", self.sizes.predicted, "backward: scatter of the head's input gradient")
            + self._between(factors, "reduce_scatter", "backward"),
        )

    def _further(self) -> tuple[Transfers, Transfers]:
        """Forward and backward of the look-up of tokens further ahead."""
        depth = self.config.model.depth
        return (
            self._of_streams("reduce_scatter", depth, "forward: scatter of the embeddings of further tokens"),
            self._of_streams("all_gather", depth, "backward: gather of their gradient"),
        )

    def _of_streams(self, kind: str, count: int, purpose: str) -> Transfers:
        """A collective over tp of so many residual streams together."""
        sizes = self.sizes
        return over("tp", kind, count * sizes.gathered, sizes.w, purpose) if count else Transfers()

    def forward(self, kind: LayerKind) -> Transfers:
        return self._layer(kind).forward_transfers(self.sizes, self.cp)

    def backward(self, kind: LayerKind, mode: Mode, split: bool) -> Transfers:
        """Backward of a layer that recomputes as `mode` says. split: gradients of weights are put off."""
        return self._layer(kind).backward_transfers(self.sizes, self.cp, mode == "full", split)

    def weight_gradients(self, kind: LayerKind) -> Transfers:
        """Transfers of a layer for the gradients of its weights, in backward or in W."""
        return self._layer(kind).weight_transfers(self.sizes)

    def _layer(self, kind: LayerKind) -> Layer:
        return Layer(self.config.model.width, kind)

    def _statistics(self) -> Transfers:
        """Log-sum-exp and target's logit of every token, gathered from all ranks that share the vocabulary."""
        sizes, tp = self.sizes, self.config.parallel.tp
        tokens = sizes.predicted * sizes.tokens
        chunk = chunk_tokens(tokens, self.config.model.width, sizes.w, tp)
        found = Transfers()
        for start in range(0, tokens, chunk) if tp > 1 else ():
            rows = min(chunk, tokens - start)
            purpose = "forward: statistics of the loss"
            found += over("tp", "all_gather", tp * rows * 2 * sizes.z, sizes.z, purpose)
        return found
