"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, §2.2), as one rank computes it; letters as in `decoder`.

D  layers of multi-token prediction, each of which predicts a token further ahead than the one before
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalite.config.model_schema import Model
from megalite.config.parametrization import multipliers
from megalite.config.schema import Kernels
from megalite.model.norm import Norm, NormKind
from megalite.parallel.tensor import CopiedLinear, of_own_part
from megalite.plan.parts.mtp import MtpPart


@dataclass(frozen=True)
class Ahead:
    """A micro-batch for a last stage that predicts several tokens at every position.

    The layers' targets are beside each other, as if every one had a batch of its own, after those of the next token.
    """

    tokens: Tensor  # s D·b: each layer's, that which the layer before has predicted
    targets: Tensor  # s (1+D)·b; IGNORED_TARGET where none counts
    scales: Tensor  # s (1+D)·b: factors of their losses; 1 for those of the next token
    shares: Tensor  # D, in float64: of the mean of each layer's losses, that of one target


class Join(nn.Module):
    """The beginning and the end of a layer of multi-token prediction; `plan.parts.mtp` describes its weights.

    The stream before the first of such layers is what the head takes, so with its final norm; those of others have
    their own. The order of the matrix's inputs, embedding first, is that of DeepSeek-V3's weights, in which the paper's
    is the other way round.
    """

    def __init__(self, model: Model, tp: DeviceMesh, kernels: Kernels) -> None:
        super().__init__()
        weights, kind = dict(MtpPart(model.width).weights()), NormKind.of(model)

        def norm(name: str, factor: float = 1.0) -> Norm:
            return Norm(weights[f"{name}.weight"], kind, tp, kernels, factor)

        self.embedding_norm, self.stream_norm = norm("embedding_norm"), norm("stream_norm")
        self.projection = CopiedLinear(weights["projection.weight"], tp)
        self.output_norm = norm("output_norm", multipliers(model).logits)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """The layer's stream, of that of the layer before and the embeddings of the tokens it predicts: `[s/t, b, d]`
        all."""
        both = torch.cat((self.embedding_norm(embedded), self.stream_norm(x)), dim=-1)
        (made,) = of_own_part(both, [self.projection])
        return made
