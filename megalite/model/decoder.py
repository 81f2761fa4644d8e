"""The Llama family's decoder, as one rank of one pipeline stage computes it.

    s  sequence        h  query heads          f  feed-forward width
    b  micro-batch     k  key-value heads      v  vocabulary
    d  model width     e  width of a head      t  tensor-parallel size

Between attention and MLP the sequence is split over tp (sequence parallelism, arXiv 2205.05198): norms and
residuals are `[s/t, b, d]`. A pipeline stage is the same decoder with the layers of other stages left out,
so every parameter has one global name.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layers import LayerKind, adapter_of, layer_kinds
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Buffers
from megalite.config.parametrization import multipliers
from megalite.config.schema import Kernels
from megalite.distributed.collectives import all_gather
from megalite.model.adapters import adapt_embedding, add_adapters
from megalite.model.attention import Attention
from megalite.model.experts import ExpertMLPs, Experts
from megalite.model.latent import LatentAttention
from megalite.model.mlp import MLP
from megalite.model.mtp import Ahead, Join
from megalite.model.norm import Norm, NormKind
from megalite.model.positions import TokenPositions
from megalite.model.router import Losses
from megalite.parallel.context import Attention as Attend
from megalite.parallel.dropout import dropping
from megalite.parallel.linear import linears
from megalite.parallel.parameter import copy_of, part
from megalite.parallel.tensor import ColumnLinear, VocabularyEmbedding, with_adapters
from megalite.plan.model.weights import (
    embedding,
    embedding_weights,
    final_norm,
    head,
    head_weights,
    layer_weights,
)
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.layer import attention, feed_forward
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite_kernels import linear_cross_entropy, scaled_linear_cross_entropy
from megalite_kernels.products import has_gpu_products

AUTO_KERNELS = Kernels()
IGNORED_TARGET = -100  # stands for a target that does not count


class Layer(nn.Module):
    """Attention and MLP, each with a norm of what it takes, of what it returns, or of both.

    in_one: the residual stream is given and returned as one tensor: full recompute would keep both of two. in_two: it
    is always given as two, as a compiled layer would have a graph for either.
    """

    in_one = in_two = False

    def __init__(
        self,
        model: Model,
        kind: LayerKind,
        tp: DeviceMesh,
        kernels: Kernels,
        ep: DeviceMesh | None = None,
        buffers: Buffers = "exact",
    ) -> None:
        super().__init__()
        self.before, self.both = "before" in kind.norms, len(kind.norms) == 2
        branch = multipliers(model).branch
        # The last module before the stream takes the factor of the branch.
        of_norm, of_rest = (branch, 1.0) if "after" in kind.norms else (1.0, branch)
        of_first = 1.0 if self.before else of_norm
        weights, norms = dict(layer_weights(model, kind)), NormKind.of(model)

        def norm(name: str, factor: float) -> Norm:
            return Norm(weights[f"{name}.weight"], norms, tp, kernels, factor)

        self.attention_norm = norm("attention_norm", of_first)
        attends = attention(model.width, kind)
        self.attention: Attention | LatentAttention
        if isinstance(attends, GroupedQueryPart):
            self.attention = Attention(attends, norms, kind.rope is not None, tp, kernels, of_rest)
        else:
            self.attention = LatentAttention(attends, norms.one_plus, tp, kernels, of_rest)
        self.mlp_norm = norm("mlp_norm", of_first)
        part = feed_forward(model.width, kind.feed_forward, kind.base)
        self.mlp: MLP | Experts
        if isinstance(part, SwiGLUPart):
            self.mlp = MLP(part, tp, kernels, of_rest)
        else:
            self.mlp = Experts(part, tp, ep or tp, kernels, of_rest, buffers)
        if self.both:
            self.attention_output_norm = norm("attention_output_norm", of_norm)
            self.mlp_output_norm = norm("mlp_output_norm", of_norm)
        if kind.mtp:
            self.mtp = Join(model, tp, kernels)
        if kind.adapter is not None:
            add_adapters(self, weights, kind.adapter, tp, ep or tp)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, ...],
        attend: Attend,
        added: Tensor | None = None,
        numbers: Tensor | None = None,
        *of_experts: Losses,
    ) -> tuple[Tensor, Tensor | None]:
        """Two tensors `[s/t, b, d]`, whose sum is the residual stream: the next norm adds them in its own pass.

        x, added: the stream before, likewise; None: x alone is. numbers: of tokens, see `TokenPositions`. of_experts:
        losses of a layer that has experts.
        """
        if numbers is None:
            return self._forward(x, angles, attend, added, *of_experts)
        with dropping(numbers):
            return self._forward(x, angles, attend, added, *of_experts)

    def _forward(
        self, x: Tensor, angles: tuple[Tensor, ...], attend: Attend, added: Tensor | None, *of_experts: Losses
    ) -> tuple[Tensor, Tensor | None]:
        if self.before:
            normed, x = self.attention_norm.of_sum(x, added)
            # Outputs have no names here, by which they would be held for longer than they are needed.
            if self.both:
                normed, x = self.mlp_norm.of_sum(x, self.attention_output_norm(self.attention(normed, angles, attend)))
            else:
                normed, x = self.mlp_norm.of_sum(x, self.attention(normed, angles, attend))
            added = self.mlp_output_norm(self.mlp(normed, *of_experts)) if self.both else self.mlp(normed, *of_experts)
        else:
            x = x if added is None else x + added
            x = x + self.attention_norm(self.attention(x, angles, attend))
            added = self.mlp_norm(self.mlp(x, *of_experts))
        return (x + added, None) if self.in_one else (x, added)


class MtpLayer(Layer):
    """A layer of multi-token prediction, which takes the embeddings of tokens beside a stream; see `mtp.Join`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, embedded: Tensor, angles: tuple[Tensor, ...], attend: Attend, *of_experts: Losses
    ) -> Tensor:
        """The stream with its norm, of the stream x of the layer before, with its own: `[s/t, b, d]` both."""
        x, added = self._forward(self.mtp(x, embedded), angles, attend, None, *of_experts)
        return self.mtp.output_norm.of_sum(x, added)[0]


class _Nothing(torch.autograd.Function):
    """Zeros, which a compiled layer adds to its stream x, and which require a gradient as the sums after them do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Head(nn.Module):
    """Final norm and output projection, the vocabulary split over tp: `[s/t, b, d]` → logits `[s, b, v/t]`.

    The vocabulary is padded (`config.layout.vocabulary_rows`). The loss leaves padding out, and so do logits of one
    rank; ranks that share the vocabulary return as many each, and those of padding mean nothing.
    Logits are multiplied by a number, which is done in the norm, and may then be capped. Given targets `[s, b]`, the
    head returns their cross-entropy instead, summed over those that are not IGNORED_TARGET. Logits then exist only in
    chunks. A split backward makes the gradient of the head's weight at once: to put it off, the gradient of the logits
    would have to be kept.

    Multi-token prediction makes further streams of the one that has the final norm, for each of which the head has
    targets, too. Their losses are in the gradient, not in the number that the head returns. further: `[D]` in float64,
    this rank's parts of the means of these losses, in the passes since it was last None.
    """

    further: Tensor | None = None

    def __init__(self, model: Model, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.norm = Norm(final_norm(model), NormKind.of(model), tp, kernels, multipliers(model).logits)
        self.vocabulary, self.softcap = model.vocab_size, model.logits_softcap
        self.output = None if model.tie_embeddings else ColumnLinear(head(model), tp)
        if model.adapter is not None:
            add_adapters(self, head_weights(model), adapter_of(model.adapter), tp, tp)
        options: dict[str, Any] = {
            "ignore_index": IGNORED_TARGET,
            "vocabulary": self.vocabulary,
            "softcap": self.softcap,
            "backend": kernels.cross_entropy,
        }
        self.cross_entropy: Callable[..., Tensor] = partial(linear_cross_entropy, **options)
        self.scaled_cross_entropy: Callable[..., tuple[Tensor, Tensor]] = partial(
            scaled_linear_cross_entropy, **options
        )

    def forward(
        self,
        x: Tensor,
        tied: Tensor | None,
        targets: Tensor | None,
        ahead: Ahead | None = None,
        layers: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> Tensor:
        """Logits or loss, as the class says.

        ahead: with multi-token prediction, in place of targets. layers: each makes a stream `[s/t, b, d]` of the one
        before.
        """
        x = self.norm(x)
        if ahead is not None:
            return self._several(x, self._weight(tied), ahead, layers)
        if targets is None:
            return self.logits(x, tied)
        weight = self._weight(tied)
        beside = None if self.output is None else self._beside(x, self.output)
        x = all_gather(x, self.group)  # s b d
        flat = x.flatten(0, 1), part(weight), targets.flatten()
        return self.cross_entropy(*flat, self.group, wide_gradient=_is_wide(weight, x), beside=beside)

    def logits(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """Logits `[s, b, v/t]` of a stream `[s/t, b, d]` that has its norm."""
        logits = linears(x, [self._weight(tied)], self.group)
        (made,) = logits if self.output is None else with_adapters(logits, x, [self.output], self.group)
        if self.group.size() == 1:
            made = made[..., : self.vocabulary]
        return made if self.softcap is None else self.softcap * (made / self.softcap).tanh()

    def _weight(self, tied: Tensor | None) -> Tensor:
        """The weight of the output layer. tied: the embedding's, if it is that."""
        weight = tied if self.output is None else self.output.weight
        assert weight is not None
        return weight

    def _several(self, x: Tensor, weight: Tensor, ahead: Ahead, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """The loss of the next token, with the gradient of the losses of all that are predicted. x: with its norm."""
        streams = [x]
        for layer in layers:
            streams.append(layer(streams[-1]))
        x = all_gather(torch.cat(streams, 1), self.group)  # s (1+D)·b d
        flat = x.flatten(0, 1), part(weight), ahead.targets.flatten(), ahead.scales.flatten()
        total, each = self.scaled_cross_entropy(*flat, self.group, wide_gradient=_is_wide(weight, x))
        sums = each.view(len(x), len(streams), -1).double().sum((0, 2))
        means = sums[1:] * ahead.shares
        self.further = means if self.further is None else self.further + means
        return sums[0] + (total - total.detach())

    def _beside(self, x: Tensor, output: ColumnLinear) -> tuple[Tensor, Tensor] | None:
        """Two factors whose product an adapter of the output layer adds to logits: features `[s·b, r]` and a weight
        `[v/t, r]`; None: there is no adapter. x: `[s/t, b, d]`."""
        if output.lora_a is None or output.lora_b is None:
            return None
        (between,) = linears(x, [output.lora_a.weight], factor=output.lora_scale)
        return all_gather(between, self.group).flatten(0, 1), part(output.lora_b.weight)


def _is_wide(weight: Tensor, x: Tensor) -> bool:
    """Return whether the gradient of a weight with a copy is its float32 sum; a CPU rounds, as its products do."""
    return copy_of(weight) is not None and has_gpu_products(x)


class Decoder(nn.Module):
    """The layers `layers` of the model, with the embedding if `first` and the head if `last`.

    A last stage that needs the embedding, see `Model.shares_embedding`, holds a copy of it under the same name. ep: the
    ranks that share out the experts of a layer; None: those of tp do. buffers: as `parallel.experts.buffers`.
    """

    def __init__(
        self,
        model: Model,
        tp: DeviceMesh,
        layers: range,
        first: bool = True,
        last: bool = True,
        kernels: Kernels = AUTO_KERNELS,
        ep: DeviceMesh | None = None,
        buffers: Buffers = "exact",
    ) -> None:
        super().__init__()
        self.model, self.first, self.shares = model, first, last and model.shares_embedding
        self.factor = multipliers(model).embedding
        self.group = tp.get_group()
        self.embed = VocabularyEmbedding(embedding(model), tp) if first or self.shares else None
        if self.embed is not None and model.adapter is not None:
            adapt_embedding(self.embed, embedding_weights(model), adapter_of(model.adapter), tp)
        kinds = layer_kinds(model)
        self.kinds = [kinds[layer] for layer in layers]
        self.layers = nn.ModuleDict(
            {
                str(layer): (MtpLayer if kinds[layer].mtp else Layer)(model, kinds[layer], tp, kernels, ep, buffers)
                for layer in layers
            }
        )
        every = list(zip(self.layers.items(), self.kinds, strict=True))
        self._of_stream = [(name, layer, kind) for (name, layer), kind in every if not kind.mtp]
        self._further = [(name, layer, kind) for (name, layer), kind in every if kind.mtp]
        self.head = Head(model, tp, kernels) if last else None

    def forward(
        self, x: Tensor, positions: TokenPositions | None = None, targets: Tensor | Ahead | None = None
    ) -> Tensor:
        """Returns activations `[s/t, b, d]`, or from the last stage logits `[s, b, v/t]`.

        x: tokens `[s, b]` on the first stage, activations `[s/t, b, d]` on others. positions: of the s tokens that this
        rank holds; None: they are one document from its beginning. targets: `[s, b]`, for the last stage, which then
        returns the loss summed over the targets instead of logits; with multi-token prediction, all that it takes.
        """
        x = self.activations(x, positions)
        if isinstance(targets, Ahead):
            return self._with_layers_of_mtp(x, positions or self._whole(x), targets)
        return x if self.head is None else self.answer(x, targets)

    def activations(self, x: Tensor, positions: TokenPositions | None = None) -> Tensor:
        """Activations `[s/t, b, d]` of the last layer here. x, positions: as in `forward`."""
        if self.first:
            x = self._embedded(x)
        positions = positions or self._whole(x)
        turned = dict.fromkeys(kind.rotation for kind in self.kinds)
        angles = {each: () if each is None else positions.angles(each) for each in turned}
        added: Tensor | None = None
        for name, layer, kind in self._of_stream:
            if layer.in_one and added is not None:
                x, added = x + added, None
            elif layer.in_two and added is None:
                added = _Nothing.apply(x)
            attend = positions.attend(int(name), kind.attention.heads.scores)
            of_experts = (positions.losses,) if kind.mixture is not None else ()
            x, added = layer(x, angles[kind.rotation], attend, added, positions.numbers, *of_experts)
        return x if added is None else x + added

    def answer(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The head's logits or loss, as in `forward`, of activations `[s/t, b, d]` of the last layer."""
        assert self.head is not None
        return self.head(x, self._tied(), targets)

    def _with_layers_of_mtp(self, x: Tensor, positions: TokenPositions, ahead: Ahead) -> Tensor:
        """The head's loss of the next token, with the gradient of the losses of all that are predicted."""
        assert self.head is not None
        embedded = self._embedded(ahead.tokens)
        layers = [
            partial(self.predict, name, layer, kind, part, positions)
            for (name, layer, kind), part in zip(self._further, embedded.chunk(len(self._further), 1), strict=True)
        ]
        return self.head(x, self._tied(), None, ahead, layers)

    def further(self, x: Tensor, tokens: Tensor, positions: TokenPositions) -> Tensor:
        """The stream `[s/t, b, d]`, with its norm, of the first layer of multi-token prediction.

        x: activations of the last of the other layers, likewise. tokens: `[s, b]`, each the one after its position.
        """
        assert self.head is not None
        name, layer, kind = self._further[0]
        return self.predict(name, layer, kind, self._embedded(tokens), positions, self.head.norm(x))

    def further_logits(self, x: Tensor) -> Tensor:
        """Logits `[s, b, v/t]` of what `further` returns."""
        assert self.head is not None
        return self.head.logits(x, self._tied())

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.embed is not None
        found = self.embed(tokens)  # s/t b d
        return found if self.factor == 1 else found * self.factor

    def predict(
        self, name: str, layer: nn.Module, kind: LayerKind, embedded: Tensor, positions: TokenPositions, x: Tensor
    ) -> Tensor:
        """The stream of a layer of multi-token prediction, of the stream x of the one before."""
        angles = () if kind.rotation is None else positions.angles(kind.rotation)
        of_experts = (positions.losses,) if kind.mixture is not None else ()
        return layer(x, embedded, angles, positions.attend(int(name), kind.attention.heads.scores), *of_experts)

    def _tied(self) -> Tensor | None:
        """The embedding's weight, if the head uses it: FSDP2 hooks into every argument, so it takes no other."""
        return self.embed.weight if self.model.tie_embeddings and self.embed is not None else None

    def _whole(self, x: Tensor) -> TokenPositions:
        """Positions of activations `[s/t, b, d]` of whole documents."""
        return TokenPositions.whole(self.model, x.shape[0] * self.group.size(), x.device, x.dtype)

    def experts(self) -> list[nn.Module]:
        """The experts of each layer that has some."""
        return [module for module in self.modules() if isinstance(module, ExpertMLPs)]

    def gathered_apart(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers one after another; an embedding that both ends use is left out."""
        apart = [*self.layers.values(), self.head] if self.shares else [self.embed, *self.layers.values(), self.head]
        return [module for module in apart if module is not None]
