"""The feed-forward of a layer with experts, as one rank computes it; the letters of shapes are those of `router`."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megalite.config.layers import Mixture
from megalite.config.parallel_schema import Buffers
from megalite.config.schema import Kernels
from megalite.model.mlp import MLP
from megalite.model.router import Gate, Losses, Router
from megalite.parallel.dispatch import AtHome, Dispatch
from megalite.parallel.experts import GroupedProduct, Rows, add_biases
from megalite.parallel.gathered import Gathered
from megalite.parallel.linear import linears
from megalite.parallel.parameter import parameter, part
from megalite.parallel.recompute import Cheap, remembered
from megalite.parallel.tensor import Linear, second_factor
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.part import Weight
from megalite_kernels import weighted_swiglu
from megalite_kernels.backend import Backend

NO_LOSSES = Losses()
NAMES = ("gate", "up", "down")  # matrices of an expert


class ExpertLinear(Linear):
    """A matrix of each expert, `[E, out, in]`, with biases `[E, out]` or none. factor: of what comes out of it."""

    own_product = True

    def __init__(self, weight: Weight, bias: Weight | None, ep: DeviceMesh, factor: float = 1.0) -> None:
        super().__init__(weight)
        self.weight, self.factor = parameter(weight, ep, Shard(0)), factor
        self.bias = None if bias is None else parameter(bias, ep, Shard(0))


class Experts(nn.Module):
    """SwiGLU feed-forwards, of which a router chooses a few for every token. factor: multiplies the output."""

    def __init__(
        self,
        planned: ExpertsPart,
        tp: DeviceMesh,
        ep: DeviceMesh,
        kernels: Kernels,
        factor: float = 1.0,
        buffers: Buffers = "exact",
    ) -> None:
        super().__init__()
        weights, self.kind = dict(planned.weights()), planned.kind
        self.router = Router(weights, self.kind.router, self.kind.active, tp)
        self.experts = ExpertMLPs(weights, self.kind, ep, kernels, factor)
        self.shared = None if planned.shared is None else MLP(planned.shared, tp, kernels, factor)
        self.shared_gate = Gate(weights["shared_gate.weight"], tp) if self.kind.shared_gate else None
        self.spread, self.group, self.kernels = Cheap(Rows.spread), ep.get_group(), kernels.experts
        self.fixed = buffers == "worst_case" and self.group.size() > 1

    def forward(self, x: Tensor, losses: Losses = NO_LOSSES) -> Tensor:
        """Output `[s/t, b, d]` of tokens `[s/t, b, d]`."""
        scores, experts = self.router(x, losses)
        dispatch = remembered(lambda: self._dispatch(experts))
        dispatch.send(x, scores)
        shared = self._shared(x)  # while tokens travel, forward and backward
        y = dispatch.compute(self.experts)
        return y if shared is None else y + shared

    def _shared(self, x: Tensor) -> Tensor | None:
        """Output `[s/t, b, d]` of the shared expert, if there is one."""
        if self.shared is None:
            return None
        y: Tensor = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x)

    def _dispatch(self, experts: Tensor) -> AtHome | Dispatch | Gathered:
        """The way of tokens to `experts` that they have chosen."""
        count, known = self.kind.count, self._known_counts(experts.numel())
        if self.fixed:
            gathered = Gathered(experts, count, self.group, self.spread, known, self.kernels)
            self._count(gathered.chosen)
            return gathered
        rows = Rows(experts, count, known, self.kernels)
        self._count(rows.on_device)
        return AtHome(rows, self.spread) if self.group.size() == 1 else Dispatch(rows, self.group)

    def _count(self, chosen: Tensor) -> None:
        if torch.is_grad_enabled():
            self.router.count(chosen)

    def _known_counts(self, choices: int) -> list[int] | None:
        """Rows of each expert, where they do not hang on the router."""
        if not self.kind.router.force_balance:
            return None
        each, more = divmod(choices, self.kind.count)
        return [each + (expert < more) for expert in range(self.kind.count)]


class ExpertMLPs(nn.Module):
    """The experts of a layer. weights: by name, of the layer's part."""

    def __init__(
        self, weights: Mapping[str, Weight], kind: Mixture, ep: DeviceMesh, kernels: Kernels, factor: float
    ) -> None:
        super().__init__()
        pairs = ((weights[f"experts.{name}.weight"], weights.get(f"experts.{name}.bias")) for name in NAMES)
        gate, up, down = pairs
        self.gate, self.up = ExpertLinear(*gate, ep), ExpertLinear(*up, ep)
        self.down = ExpertLinear(*down, ep, factor)
        self.swiglu = Cheap(partial(_swiglu, kernels.experts, kind.clamped))

    def forward(self, x: Tensor, scores: Tensor, rows: Rows) -> Tensor:
        """Outputs `[nK, d]` of rows `[nK, d]`, each times its score, `[nK]`."""
        gate, up = _products([self.gate, self.up], x, rows)  # nK f
        (y,) = _products([self.down], self.swiglu(gate, up, scores, rows.number), rows, scores)
        return y


def _swiglu(backend: Backend, clamped: bool, gate: Tensor, up: Tensor, scores: Tensor, number: Tensor | None) -> Tensor:
    return weighted_swiglu(gate, up, scores, backend, clamped, number)


def _products(layers: Sequence[ExpertLinear], x: Tensor, rows: Rows, scores: Tensor | None = None) -> Sequence[Tensor]:
    """Outputs of layers that share an input. scores: of the rows, where the input has them as factors already."""
    first, weights = layers[0], [layer.weight for layer in layers]
    product = GroupedProduct(rows, x.dtype if first.beside_adapters else None)
    made = linears(x, weights, None, first.gradients, product, first.factor)
    adapters = [layer.lora_a.weight for layer in layers if layer.lora_a is not None]
    between = linears(x, adapters, None, first.gradients, product) if adapters else ()  # nK r
    for y, layer, z in zip(made, layers, between, strict=bool(adapters)):
        y += second_factor(layer, z, layer.lora_scale * layer.factor, product)
    if first.bias is None:
        return made
    factors = scores if scores is None or first.factor == 1 else scores * first.factor
    return [add_biases(y, part(layer.bias), rows, factors) for y, layer in zip(made, layers, strict=True)]
