"""Grouped-query attention, as one rank computes it; the letters of shapes are those of `decoder`."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from megalite.config.schema import Kernels
from megalite.model.norm import NormKind
from megalite.model.weights import column, row
from megalite.parallel.context import Attention as Attend
from megalite.parallel.context import takes_parts
from megalite.parallel.norm import scaled, split_rms_norm
from megalite.parallel.parameter import parameter, part, whole
from megalite.parallel.recompute import Cheap
from megalite.parallel.tensor import columns, columns_in_one
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.part import Weight
from megalite_kernels import qk_norm_rope, rms_norm, rope, rope_of_joint, rope_of_parts


class HeadNorm(nn.Module):
    """The norm of every query or key head, and its rotation in a layer with rotary positions."""

    def __init__(self, weight: Weight, kind: NormKind, rotary: bool, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.roles = {"weight": weight.role}
        self.weight = parameter(weight, tp, Replicate())
        self.kind = kind
        self.norm = Cheap(partial(qk_norm_rope if rotary else rms_norm, backend=kernels.rope))

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        return self.norm(x, self.kind.gains(whole(self.weight)), *angles, self.kind.eps)


class AllHeadsNorm(nn.Module):
    """The norm of all query or key heads of a token together, split over tp, and their rotation if they have one."""

    def __init__(self, weight: Weight, head_size: int, kind: NormKind, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        self.roles = {"weight": weight.role}
        self.weight = parameter(weight, tp, Shard(0))
        self.head_size, self.kind = head_size, kind
        self.group = tp.get_group()
        self.rms_norm = partial(rms_norm, backend=kernels.rms_norm)
        self.rope = partial(rope, backend=kernels.rope)
        self.alone, self.scaled = Cheap(self._alone), Cheap(self._scaled)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        gains, x = self.kind.gains(part(self.weight)), x.flatten(2)
        if self.group.size() == 1:
            return self.alone(x, gains, *angles)
        normal, inverse = split_rms_norm(x, gains, self.kind.eps, self.group)
        # Recompute is given r, so it does not sum over ranks again.
        return self.scaled.remember(self._turned(normal, *angles), x, inverse, gains, *angles)

    def _alone(self, x: Tensor, gains: Tensor, *angles: Tensor) -> Tensor:
        return self._turned(self.rms_norm(x, gains, self.kind.eps), *angles)

    def _scaled(self, x: Tensor, inverse: Tensor, gains: Tensor, *angles: Tensor) -> Tensor:
        return self._turned(scaled(x, inverse, gains), *angles)

    def _turned(self, x: Tensor, *angles: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_size))  # s b h/t e
        if not angles:
            return x
        cos, sin = angles
        return self.rope(x, cos, sin)


class Attention(nn.Module):
    """Causal grouped-query attention, heads split over tp. norm: form of norms. factor: of its output."""

    def __init__(
        self,
        planned: GroupedQueryPart,
        norm: NormKind,
        rotary: bool,
        tp: DeviceMesh,
        kernels: Kernels,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        weights, heads, kind = dict(planned.weights()), planned.heads, planned.kind
        keys = heads.kv_count // tp.size()
        # This rank's heads of queries, keys and values, and their widths.
        self.shapes = (heads.count // tp.size(), heads.width), (keys, heads.width), (keys, heads.value_width)
        self.group = tp.get_group()
        self.q, self.k, self.v = column(weights, "q", tp), column(weights, "k", tp), column(weights, "v", tp)
        self.o = row(weights, "o", tp, factor)
        self.sinks: nn.Parameter | None = None
        if heads.scores.sinks:
            self.roles = {"sinks": weights["sinks"].role}
            self.sinks = parameter(weights["sinks"], tp, Shard(0))
        self.q_norm: HeadNorm | AllHeadsNorm | None = None
        self.k_norm: HeadNorm | AllHeadsNorm | None = None
        if kind.norms == "head":
            self.q_norm = HeadNorm(weights["q_norm.weight"], norm, rotary, tp, kernels)
            self.k_norm = HeadNorm(weights["k_norm.weight"], norm, rotary, tp, kernels)
        elif kind.norms == "all":
            self.q_norm = AllHeadsNorm(weights["q_norm.weight"], heads.width, norm, tp, kernels)
            self.k_norm = AllHeadsNorm(weights["k_norm.weight"], heads.width, norm, tp, kernels)
        # A norm keeps what it takes, and attention without RoPE too: a part of one tensor would keep all of that.
        self.share_input = ("q", "k", "v") if rotary and kind.norms is None else ()
        # Without q/k norms, nothing else keeps the input of RoPE, so recomputing RoPE would save no memory.
        self.rope = partial(rope, backend=kernels.rope)
        self.rope_of_joint = partial(rope_of_joint, backend=kernels.rope)
        self.rope_of_parts = partial(rope_of_parts, backend=kernels.rope)

    def forward(self, x: Tensor, angles: tuple[Tensor, ...], attend: Attend) -> Tensor:
        """Output `[s/t, b, d]` of attention. angles: cosine and sine of every token; none without rotary positions."""
        sinks = () if self.sinks is None else (part(self.sinks),)
        return self.o(attend(*self._heads(x, angles, attend), *sinks).flatten(2))  # s/t b d

    def _heads(self, x: Tensor, angles: tuple[Tensor, ...], attend: Attend) -> Sequence[Tensor]:
        """Queries `[s, b, h/t, e]`, keys and values `[s, b, k/t, e]`, as attention takes them."""
        layers = self.q, self.k, self.v
        joint = columns_in_one(x, layers, self.group)
        if joint is not None:
            cos, sin = angles
            return self.rope_of_joint(joint, self.shapes, cos, sin, in_place=takes_parts(attend, joint.shape[1]))
        projections = columns(x, layers, self.group)
        q, k, v = (z.view(*z.shape[:-1], *shape) for z, shape in zip(projections, self.shapes, strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q, *angles), self.k_norm(k, *angles), v
        if not angles:
            return q, k, v
        cos, sin = angles
        if v.is_contiguous():
            return self.rope(q, cos, sin), self.rope(k, cos, sin), v
        # Parts of what one product has made, where they stay if backward needs all of it.
        return self.rope_of_parts(q, k, v, cos, sin, in_place=takes_parts(attend, q.shape[1]))
