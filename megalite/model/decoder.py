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
from torch.distributed.tensor import Replicate, Shard

from megalite.config.layers import FeedForward, LayerKind, layer_kinds
from megalite.config.parametrization import multipliers
from megalite.config.schema import Kernels, Model
from megalite.dist.collectives import all_gather
from megalite.model.positions import TokenPositions
from megalite.parallel.context import Attention as Attend
from megalite.parallel.linear import linears
from megalite.parallel.norm import scaled, split_rms_norm
from megalite.parallel.parameter import parameter, part, whole
from megalite.parallel.recompute import Cheap
from megalite.parallel.tensor import ColumnLinear, RowLinear, VocabularyEmbedding, columns
from megalite.plan import roles
from megalite.plan.roles import Role
from megalite_kernels import add_rms_norm, linear_cross_entropy, qk_norm_rope, rms_norm, rope, swiglu

AUTO = Kernels()


class Norm(nn.Module):
    """RMSNorm, multiplied by `factor`: in the few weights, so that no pass over activations is added."""

    def __init__(
        self, model: Model, tp: DeviceMesh, kernels: Kernels, role: Role = roles.NORM, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.roles = {"weight": role}
        self.weight = parameter((model.width,), tp, Replicate())
        self.eps, self.factor = model.norm_eps, factor
        self.rms_norm = Cheap(partial(rms_norm, backend=kernels.rms_norm))
        self.add_rms_norm = partial(add_rms_norm, backend=kernels.rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self._gains(), self.eps)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y."""
        gains = self._gains()
        normal, total = self.add_rms_norm(x, y, gains, self.eps)
        return self.rms_norm.remember(normal, total, gains, self.eps), total

    def _gains(self) -> Tensor:
        weight = whole(self.weight)
        return weight if self.factor == 1 else weight * self.factor


class HeadNorm(nn.Module):
    """The norm of every query or key head, and its rotation in a layer with rotary positions."""

    def __init__(self, width: int, eps: float, rotary: bool, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.roles = {"weight": roles.HEAD_NORM}
        self.weight = parameter((width,), tp, Replicate())
        self.eps = eps
        self.rotary = rotary
        self.norm = Cheap(partial(qk_norm_rope if rotary else rms_norm, backend=kernels.rope))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turns = (cos, sin) if self.rotary else ()
        return self.norm(x, whole(self.weight), *turns, self.eps)


class AllHeadsNorm(nn.Module):
    """The norm of all query or key heads of a token together, split over tp, and their rotation if they have one."""

    def __init__(
        self, heads: int, head_size: int, role: Role, eps: float, rotary: bool, tp: DeviceMesh, kernels: Kernels
    ) -> None:
        super().__init__()
        self.roles = {"weight": role}
        self.weight = parameter((heads * head_size,), tp, Shard(0))
        self.head_size, self.eps, self.rotary = head_size, eps, rotary
        self.group = tp.get_group()
        self.rms_norm = partial(rms_norm, backend=kernels.rms_norm)
        self.rope = partial(rope, backend=kernels.rope)
        self.alone, self.scaled = Cheap(self._alone), Cheap(self._scaled)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        weight, x = part(self.weight), x.flatten(2)
        if self.group.size() == 1:
            return self.alone(x, weight, cos, sin)
        normal, inverse = split_rms_norm(x, weight, self.eps, self.group)
        # Recompute is given r, so it does not sum over ranks again.
        return self.scaled.remember(self._turned(normal, cos, sin), x, inverse, weight, cos, sin)

    def _alone(self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._turned(self.rms_norm(x, weight, self.eps), cos, sin)

    def _scaled(self, x: Tensor, inverse: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._turned(scaled(x, inverse, weight), cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_size))  # s b h/t e
        return self.rope(x, cos, sin) if self.rotary else x


class Attention(nn.Module):
    """Causal grouped-query attention, heads split over tp. factor: of its output."""

    def __init__(self, model: Model, rotary: bool, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        e = model.head_size
        self.head_size, self.rotary = e, rotary
        self.group = tp.get_group()
        self.q = ColumnLinear(model.width, model.heads * e, tp, roles.QUERY, model.qkv_bias)
        self.k = ColumnLinear(model.width, model.kv_heads * e, tp, roles.KEY, model.qkv_bias)
        self.v = ColumnLinear(model.width, model.kv_heads * e, tp, roles.VALUE, model.qkv_bias)
        self.o = RowLinear(model.heads * e, model.width, tp, roles.ATTENTION_OUTPUT, factor)
        how = model.norm_eps, rotary, tp, kernels
        self.q_norm: HeadNorm | AllHeadsNorm | None = None
        self.k_norm: HeadNorm | AllHeadsNorm | None = None
        if model.qk_norm and model.qk_norm_width == "head":
            self.q_norm, self.k_norm = HeadNorm(e, *how), HeadNorm(e, *how)
        elif model.qk_norm:
            self.q_norm = AllHeadsNorm(model.heads, e, roles.QUERY_NORM, *how)
            self.k_norm = AllHeadsNorm(model.kv_heads, e, roles.KEY_NORM, *how)
        # Without q/k norms, nothing else keeps the input of RoPE, so recomputing RoPE would save no memory.
        self.rope = partial(rope, backend=kernels.rope)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        projections = columns(x, (self.q, self.k, self.v), self.group)
        q, k, v = (z.view(*z.shape[:-1], -1, self.head_size) for z in projections)  # q: s b h/t e; k, v: s b k/t e
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, cos, sin), self.k_norm(k, cos, sin)
        elif self.rotary:
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        return self.o(attend(q, k, v).flatten(2))  # s/t b d


class MLP(nn.Module):
    """SwiGLU feed-forward, its width split over tp. factor: of its output."""

    def __init__(self, width: int, kind: FeedForward, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.gate = ColumnLinear(width, kind.width, tp, roles.GATE)
        self.up = ColumnLinear(width, kind.width, tp, roles.UP)
        self.swiglu = Cheap(partial(swiglu, backend=kernels.swiglu))
        self.down = RowLinear(kind.width, width, tp, roles.DOWN, factor)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(x, (self.gate, self.up), self.group)  # s b f/t
        return self.down(self.swiglu(gate, up))  # s/t b d


class Layer(nn.Module):
    """Attention and MLP, each with a norm of what it takes or, with `model.norm: post`, of what it returns."""

    def __init__(self, model: Model, kind: LayerKind, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.post = model.norm == "post"
        branch = multipliers(model).branch
        of_norm, of_rest = (branch, 1.0) if self.post else (1.0, branch)  # of what is last before the residual stream
        self.attention_norm = Norm(model, tp, kernels, factor=of_norm)
        self.attention = Attention(model, kind.rotary, tp, kernels, of_rest)
        self.mlp_norm = Norm(model, tp, kernels, factor=of_norm)
        self.mlp = MLP(model.width, kind.feed_forward, tp, kernels, of_rest)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.post:
            x = x + self.attention_norm(self.attention(x, cos, sin, attend))
            return x + self.mlp_norm(self.mlp(x))
        normed, x = self.mlp_norm.of_sum(x, self.attention(self.attention_norm(x), cos, sin, attend))
        return x + self.mlp(normed)


class Head(nn.Module):
    """Final norm and output projection, the vocabulary split over tp: `[s/t, b, d]` → logits `[s, b, v/t]`.

    A vocabulary that tp does not divide is padded; the logits of padding mean nothing, and the loss leaves them out.
    Logits are multiplied by a number, which is done in the norm. Given targets `[s, b]`, the head returns their
    cross-entropy instead, summed over tokens. Logits then exist only in chunks. A split backward makes the gradient of
    the head's weight at once: to put it off, the gradient of the logits would have to be kept.
    """

    def __init__(self, model: Model, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.norm = Norm(model, tp, kernels, roles.FINAL_NORM, multipliers(model).logits)
        self.output = None if model.tie_embeddings else ColumnLinear(model.width, model.vocab_size, tp, roles.HEAD)
        self.cross_entropy = partial(linear_cross_entropy, vocabulary=model.vocab_size, backend=kernels.cross_entropy)

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None) -> Tensor:
        weight = tied if self.output is None else self.output.weight
        assert weight is not None
        x = self.norm(x)
        if targets is None:
            (logits,) = linears(x, [weight], self.group)
            return logits
        x = all_gather(x, self.group)  # s b d
        return self.cross_entropy(x.flatten(0, 1), part(weight), targets.flatten(), self.group)


class Decoder(nn.Module):
    """The layers `layers` of the model, with the embedding if `first` and the head if `last`.

    A last stage with tied embeddings holds a copy of the embedding under the same name.
    """

    def __init__(
        self,
        model: Model,
        tp: DeviceMesh,
        layers: range,
        first: bool = True,
        last: bool = True,
        kernels: Kernels = AUTO,
    ) -> None:
        super().__init__()
        self.model, self.first, self.tied = model, first, last and model.tie_embeddings
        self.factor = multipliers(model).embedding
        self.group = tp.get_group()
        self.embed = VocabularyEmbedding(model.vocab_size, model.width, tp) if first or self.tied else None
        kinds = layer_kinds(model)
        self.attention_kinds = [kinds[layer].attention for layer in layers]
        self.layers = nn.ModuleDict({str(layer): Layer(model, kinds[layer], tp, kernels) for layer in layers})
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
        """What the last layer here makes of x, as in `forward`: `[s/t, b, d]`."""
        if self.first:
            assert self.embed is not None
            x = self.embed(x)  # s/t b d
            x = x if self.factor == 1 else x * self.factor
        if positions is None:
            positions = TokenPositions.whole(self.model, x.shape[0] * self.group.size(), x.device, x.dtype)
        cos, sin = positions.angles()
        for (name, layer), kind in zip(self.layers.items(), self.attention_kinds, strict=True):
            x = layer(x, cos, sin, positions.attend(int(name), kind))
        return x

    def answer(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The head's logits or loss, as in `forward`, of activations `[s/t, b, d]` of the last layer."""
        assert self.head is not None
        # An untied embedding is not passed: FSDP2 hooks into every argument, but the head makes no gradient for it.
        return self.head(x, self.embed.weight if self.tied and self.embed is not None else None, targets)

    def gathered_apart(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers one after another; a tied embedding, used at both ends, is left out."""
        apart = [*self.layers.values(), self.head] if self.tied else [self.embed, *self.layers.values(), self.head]
        return [module for module in apart if module is not None]
