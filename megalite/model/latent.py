"""Latent attention, as one rank computes it; the letters of shapes are those of `decoder`.

r  features of a latent     p  features of keys that turn, which all heads share
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.schema import Kernels
from megalite.distributed.collectives import all_gather
from megalite.model.norm import Norm, NormKind
from megalite.model.weights import column, row
from megalite.parallel.context import Attention as Attend
from megalite.parallel.tensor import CopiedLinear, columns, of_own_part
from megalite.plan.parts.latent import LatentPart
from megalite_kernels import rope

NORM_EPS = 1e-6  # DeepSeek's, whatever the other norms have


class LatentAttention(nn.Module):
    """Causal latent attention (arXiv 2405.04434, §2.1), heads split over tp.

    one_plus: as of `NormKind`. factor: of its output.

    In queries and keys of a head, features that pair up are neighbours, and the first pairs turn. In keys `k_shared`
    makes these, and the others are made of the latent.
    """

    def __init__(self, part: LatentPart, one_plus: bool, tp: DeviceMesh, kernels: Kernels, factor: float = 1.0) -> None:
        super().__init__()
        norm = NormKind(NORM_EPS, one_plus)
        weights, self.heads = dict(part.weights()), part.heads
        self.group = tp.get_group()
        self.latent_queries = "q_down.weight" in weights
        if self.latent_queries:
            self.q_down = CopiedLinear(weights["q_down.weight"], tp)
            self.q_norm = Norm(weights["q_norm.weight"], norm, tp, kernels)
            self.q_up = column(weights, "q_up", tp)
        else:
            self.q = column(weights, "q", tp)
        self.kv_down = CopiedLinear(weights["kv_down.weight"], tp)
        self.kv_norm = Norm(weights["kv_norm.weight"], norm, tp, kernels)
        self.k_shared = CopiedLinear(weights["k_shared.weight"], tp)
        self.k_up, self.v_up = column(weights, "k_up", tp), column(weights, "v_up", tp)
        self.o = row(weights, "o", tp, factor)
        self.rope = partial(rope, layout="interleaved", backend=kernels.rope)

    def forward(self, x: Tensor, angles: tuple[Tensor, ...], attend: Attend) -> Tensor:
        """Output `[s/t, b, d]` of attention. angles: cosine and sine of every token; none without rotary positions."""
        if self.latent_queries:
            of_q, latent, shared = of_own_part(x, (self.q_down, self.kv_down, self.k_shared))  # s/t b r, …, s/t b p
            (q,) = columns(self.q_norm(of_q), (self.q_up,), self.group)
        else:
            latent, shared = of_own_part(x, (self.kv_down, self.k_shared))
            (q,) = columns(x, (self.q,), self.group)
        k, v = columns(self.kv_norm(latent), (self.k_up, self.v_up), self.group)
        q, v = q.unflatten(-1, (-1, self.heads.width)), v.unflatten(-1, (-1, self.heads.value_width))  # s b h/t e
        shared = all_gather(shared, self.group).unsqueeze(2)  # s b 1 p
        if angles:
            (cos, sin), turning = angles, self.heads.rotary_width // 2
            q, shared = self.rope(q, cos, sin), self.rope(shared, cos[..., :turning], sin[..., :turning])
        k = k.unflatten(-1, (q.shape[2], -1))
        k = torch.cat((shared.expand(-1, -1, k.shape[2], -1), k), dim=-1)  # s b h/t e
        return self.o(attend(q, k, v).flatten(2))  # s/t b d
