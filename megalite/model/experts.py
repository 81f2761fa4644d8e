"""The feed-forward of a layer with experts, as one rank computes it; the letters of shapes are those of `router`."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megalite.config.schema import Kernels
from megalite.model.mlp import MLP
from megalite.model.router import Gate, Losses, Router
from megalite.parallel.dispatch import Dispatch
from megalite.parallel.experts import GroupedProduct, Rows
from megalite.parallel.linear import linears
from megalite.parallel.parameter import parameter
from megalite.parallel.recompute import Cheap, remembered
from megalite.parallel.tensor import Linear
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.part import Weight
from megalite_kernels import weighted_swiglu

NO_LOSSES = Losses()


class ExpertLinear(Linear):
    """A matrix of each expert, `[E, out, in]`. factor: of what comes out of it."""

    own_product = True

    def __init__(self, weight: Weight, ep: DeviceMesh, factor: float = 1.0) -> None:
        super().__init__(weight)
        self.weight, self.factor = parameter(weight, ep, Shard(0)), factor


class Experts(nn.Module):
    """SwiGLU feed-forwards, of which a router chooses a few for every token. factor: multiplies the output."""

    def __init__(
        self, part: ExpertsPart, tp: DeviceMesh, ep: DeviceMesh, kernels: Kernels, factor: float = 1.0
    ) -> None:
        super().__init__()
        weights, self.kind = dict(part.weights()), part.kind
        self.router = Router(weights, self.kind.router, self.kind.active, tp)
        self.experts = ExpertMLPs(weights, ep, kernels, factor)
        self.shared = None if part.shared is None else MLP(part.shared, tp, kernels, factor)
        self.shared_gate = Gate(weights["shared_gate.weight"], tp) if self.kind.shared_gate else None
        self.spread, self.group, self.kernels = Cheap(Rows.spread), ep.get_group(), kernels.experts

    def forward(self, x: Tensor, losses: Losses = NO_LOSSES) -> Tensor:
        """Output `[s/t, b, d]` of tokens `[s/t, b, d]`."""
        scores, experts = self.router(x, losses)
        rows, dispatch = remembered(lambda: self._routes(experts))
        taken, scores = self.spread(rows, x), rows.permuted(scores)
        if dispatch is not None:
            dispatch.send(taken, scores)
            del taken
        shared = self._shared(x)  # while rows travel, forward and backward
        made = self.experts(taken, scores, rows) if dispatch is None else dispatch.compute(self.experts)
        y = rows.collect(made)
        return y if shared is None else y + shared

    def _shared(self, x: Tensor) -> Tensor | None:
        """What the shared expert makes of tokens `[s/t, b, d]`, if there is one."""
        if self.shared is None:
            return None
        y: Tensor = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x)

    def _routes(self, experts: Tensor) -> tuple[Rows, Dispatch | None]:
        """The order of rows, and their way to ranks with other experts."""
        rows = Rows(experts, self.kind.count, self._known_counts(experts.numel()), self.kernels)
        if torch.is_grad_enabled():
            self.router.count(rows.on_device)
        return rows, None if self.group.size() == 1 else Dispatch(rows, self.group)

    def _known_counts(self, choices: int) -> list[int] | None:
        """Rows of each expert, where they do not hang on the router."""
        if not self.kind.router.force_balance:
            return None
        each, more = divmod(choices, self.kind.count)
        return [each + (expert < more) for expert in range(self.kind.count)]


class ExpertMLPs(nn.Module):
    """The experts of a layer. weights: by name, of the layer's part."""

    def __init__(self, weights: Mapping[str, Weight], ep: DeviceMesh, kernels: Kernels, factor: float) -> None:
        super().__init__()
        self.gate = ExpertLinear(weights["experts.gate.weight"], ep)
        self.up = ExpertLinear(weights["experts.up.weight"], ep)
        self.down = ExpertLinear(weights["experts.down.weight"], ep, factor)
        self.swiglu = Cheap(partial(weighted_swiglu, backend=kernels.experts))

    def forward(self, x: Tensor, scores: Tensor, rows: Rows) -> Tensor:
        """Outputs `[nK, d]` of rows `[nK, d]`, each times its score, `[nK]`."""
        gate, up = _products([self.gate, self.up], x, rows)  # nK f
        (y,) = _products([self.down], self.swiglu(gate, up, scores), rows)
        return y


def _products(layers: Sequence[ExpertLinear], x: Tensor, rows: Rows) -> Sequence[Tensor]:
    first, weights = layers[0], [layer.weight for layer in layers]
    return linears(x, weights, None, first.gradients, GroupedProduct(rows), first.factor)
