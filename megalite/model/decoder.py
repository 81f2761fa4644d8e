"""The Llama family's decoder, as one rank of one pipeline stage computes it.

    s  sequence        h  query heads          f  feed-forward width
    b  micro-batch     k  key-value heads      v  vocabulary
    d  model width     e  width of a head      t  tensor-parallel size

Between attention and MLP the sequence is split over tp (sequence parallelism, arXiv 2205.05198): norms and
residuals are `[s/t, b, d]`. A pipeline stage is the same decoder with the layers of other stages left out,
so every parameter has one global name.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.layers import LayerKind, adapter_of, layer_kinds
from megalite.config.parametrization import multipliers
from megalite.config.schema import Buffers, Kernels, Model
from megalite.distributed.collectives import all_gather
from megalite.model.adapters import adapt_embedding, add_adapters
from megalite.model.attention import Attention
from megalite.model.experts import ExpertMLPs, Experts
from megalite.model.latent import LatentAttention
from megalite.model.mlp import MLP
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
from megalite_kernels import linear_cross_entropy
from megalite_kernels.linear_cross_entropy import has_gpu_products

AUTO_KERNELS = Kernels()
IGNORED_TARGET = -100  # stands for a target that does not count


class Layer(nn.Module):
    """Attention and MLP, each with a norm of what it takes, of what it returns, or of both.

    in_one: the residual stream is given and returned as one tensor. Full recompute would keep both of two, and a
    compiled layer would have a graph for either.
    """

    in_one = False

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


class Head(nn.Module):
    """Final norm and output projection, the vocabulary split over tp: `[s/t, b, d]` → logits `[s, b, v/t]`.

    A vocabulary that tp does not divide is padded; the logits of padding mean nothing, and the loss leaves them out.
    Logits are multiplied by a number, which is done in the norm, and may then be capped. Given targets `[s, b]`, the
    head returns their cross-entropy instead, summed over those that are not IGNORED_TARGET. Logits then exist only in
    chunks. A split backward makes the gradient of the head's weight at once: to put it off, the gradient of the logits
    would have to be kept.
    """

    def __init__(self, model: Model, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.norm = Norm(final_norm(model), NormKind.of(model), tp, kernels, multipliers(model).logits)
        self.softcap = model.logits_softcap
        self.output = None if model.tie_embeddings else ColumnLinear(head(model), tp)
        if model.adapter is not None:
            add_adapters(self, head_weights(model), adapter_of(model.adapter), tp, tp)
        self.cross_entropy = partial(
            linear_cross_entropy,
            ignore_index=IGNORED_TARGET,
            vocabulary=model.vocab_size,
            softcap=model.logits_softcap,
            backend=kernels.cross_entropy,
        )

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None) -> Tensor:
        weight = tied if self.output is None else self.output.weight
        assert weight is not None
        x = self.norm(x)
        if targets is None:
            logits = linears(x, [weight], self.group)
            (made,) = logits if self.output is None else with_adapters(logits, x, [self.output], self.group)
            return made if self.softcap is None else self.softcap * (made / self.softcap).tanh()
        beside = None if self.output is None else self._beside(x, self.output)
        x = all_gather(x, self.group)  # s b d
        wide = copy_of(weight) is not None and has_gpu_products(x)  # a CPU rounds, as its products do
        flat = x.flatten(0, 1), part(weight), targets.flatten()
        return self.cross_entropy(*flat, self.group, wide_gradient=wide, beside=beside)

    def _beside(self, x: Tensor, output: ColumnLinear) -> tuple[Tensor, Tensor] | None:
        """Two factors whose product an adapter of the output layer adds to logits: features `[s·b, r]` and a weight
        `[v/t, r]`; None: there is no adapter. x: `[s/t, b, d]`."""
        if output.lora_a is None or output.lora_b is None:
            return None
        (between,) = linears(x, [output.lora_a.weight], factor=output.lora_scale)
        return all_gather(between, self.group).flatten(0, 1), part(output.lora_b.weight)


class Decoder(nn.Module):
    """The layers `layers` of the model, with the embedding if `first` and the head if `last`.

    A last stage with tied embeddings holds a copy of the embedding under the same name. ep: the ranks that share out
    the experts of a layer; None: those of tp do. buffers: as `parallel.experts.buffers`.
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
        self.model, self.first, self.tied = model, first, last and model.tie_embeddings
        self.factor = multipliers(model).embedding
        self.group = tp.get_group()
        self.embed = VocabularyEmbedding(embedding(model), tp) if first or self.tied else None
        if self.embed is not None and model.adapter is not None:
            adapt_embedding(self.embed, embedding_weights(model), adapter_of(model.adapter), tp)
        kinds = layer_kinds(model)
        self.kinds = [kinds[layer] for layer in layers]
        self.layers = nn.ModuleDict(
            {str(layer): Layer(model, kinds[layer], tp, kernels, ep, buffers) for layer in layers}
        )
        self.head = Head(model, tp, kernels) if last else None

    def forward(self, x: Tensor, positions: TokenPositions | None = None, targets: Tensor | None = None) -> Tensor:
        """Returns activations `[s/t, b, d]`, or from the last stage logits `[s, b, v/t]`.

        x: tokens `[s, b]` on the first stage, activations `[s/t, b, d]` on others. positions: of the s tokens that this
        rank holds; None: they are one document from its beginning. targets: `[s, b]`, for the last stage, which then
        returns the loss summed over the targets instead of logits.
        """
        x = self.activations(x, positions)
        return x if self.head is None else self.answer(x, targets)

    def activations(self, x: Tensor, positions: TokenPositions | None = None) -> Tensor:
        """Activations `[s/t, b, d]` of the last layer here. x, positions: as in `forward`."""
        if self.first:
            assert self.embed is not None
            x = self.embed(x)  # s/t b d
            x = x if self.factor == 1 else x * self.factor
        if positions is None:
            positions = TokenPositions.whole(self.model, x.shape[0] * self.group.size(), x.device, x.dtype)
        turned = dict.fromkeys(kind.rotation for kind in self.kinds)
        angles = {each: () if each is None else positions.angles(each) for each in turned}
        added: Tensor | None = None
        for (name, layer), kind in zip(self.layers.items(), self.kinds, strict=True):
            if layer.in_one and added is not None:
                x, added = x + added, None
            attend = positions.attend(int(name), kind.attention.heads.scores)
            of_experts = (positions.losses,) if kind.mixture is not None else ()
            x, added = layer(x, angles[kind.rotation], attend, added, positions.numbers, *of_experts)
        return x if added is None else x + added

    def answer(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The head's logits or loss, as in `forward`, of activations `[s/t, b, d]` of the last layer."""
        assert self.head is not None
        # An untied embedding is not passed: FSDP2 hooks into every argument, but the head makes no gradient for it.
        return self.head(x, self.embed.weight if self.tied and self.embed is not None else None, targets)

    def experts(self) -> list[nn.Module]:
        """The experts of each layer that has some."""
        return [module for module in self.modules() if isinstance(module, ExpertMLPs)]

    def gathered_apart(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers one after another; a tied embedding, used at both ends, is left out."""
        apart = [*self.layers.values(), self.head] if self.tied else [self.embed, *self.layers.values(), self.head]
        return [module for module in apart if module is not None]
