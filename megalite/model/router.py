"""The router of a layer with experts: which experts compute a token, and how much each counts.

    n  tokens on a rank, `[s/t, b]`    E  experts    K  those of a token

Scores are in float32 or wider. Where experts suit a token equally well, the first is chosen. Full recompute does not
choose again. A correction may be added to scores in the choice alone: experts that were chosen too often are then
chosen less, without a loss (arXiv 2408.15664). Choices may be limited to a few groups of experts: the best by the sum
of their two highest scores with sigmoid (DeepSeek-V3, arXiv 2412.19437, §2.1.2), by their highest with softmax
(DeepSeek-V2, arXiv 2405.04434, §2.2.2).

Two losses may be added to the training loss, each a mean over the tokens of the step, so that neither
depends on micro-batches or on the layout. Their gradients begin here, so they need no place in a stage's output:

    balance_loss   E · Σᵢ fᵢ pᵢ, fᵢ the share of the choices of a token's sequence that are for expert i, pᵢ its score
                   over the sum of all (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20)
    z_loss         log(Σᵢ exp(logitᵢ))² (ST-MoE, arXiv 2202.08906, eq. 5)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megalite.config import layers
from megalite.parallel.experts import WIDE_PRODUCT, rows_of_experts, widened
from megalite.parallel.linear import linears
from megalite.parallel.parameter import parameter, placed, whole
from megalite.parallel.recompute import remembered
from megalite.parallel.tensor import CopiedLinear
from megalite.plan.parts.part import Weight
from megalite_kernels.backend import wide_dtype

SIGMOID_EPS = 1e-20  # added to a sum of scores that may all be 0


@dataclass(frozen=True)
class Losses:
    """Parameters of routers' losses that a step tells.

    share: of the mean over the step's tokens, that of one token. groups: ranks that have other parts of this rank's
    sequences.
    """

    share: float = 1.0
    groups: Sequence[dist.ProcessGroup] = ()


class Gate(CopiedLinear):
    """A factor of what every token's shared expert makes, from 0 to 1. weight: `[1, d]`."""

    own_product = True

    def forward(self, x: Tensor) -> Tensor:
        (logits,) = linears(x, [self.weight], None, self.gradients, WIDE_PRODUCT)
        return logits.sigmoid().to(x.dtype)  # s/t b 1


class Router(CopiedLinear):
    """Scores and choices of `active` experts for every token. weight: `[E, d]`. bias: `[E]`, if there is one.

    load: `[E]`, how many tokens of this rank have chosen each expert in training since it was last None.
    """

    own_product = True
    load: Tensor | None = None
    correction: DTensor

    def __init__(self, weights: Mapping[str, Weight], kind: layers.Router, active: int, tp: DeviceMesh) -> None:
        weight, bias, correction = (weights.get(f"router.{name}") for name in ("weight", "bias", "correction"))
        assert weight is not None
        super().__init__(weight, tp)
        self.bias = None if bias is None else parameter(bias, tp, Replicate())
        self.kind, self.active = kind, active
        if correction is not None:
            self.roles["correction"] = correction.role
            self.register_buffer("correction", placed(correction.shape, tp, Replicate()))

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep the correction wide where weights become narrow: it is a sum of steps smaller than bf16 can tell."""
        before = self._buffers.get("correction")
        super()._apply(change, recurse)
        if before is not None and self.correction.dtype != wide_dtype(self.correction.dtype):
            self._buffers["correction"] = before.to(self.correction.device)
        return self

    def forward(self, x: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
        """Scores and experts, `[s/t, b, K]` each, of tokens `[s/t, b, d]`."""
        biases = () if self.bias is None else [widened(whole(self.bias))]
        (logits,) = linears(x, [self.weight], None, self.gradients, WIDE_PRODUCT, biases=biases)  # s/t b E
        experts, shares = remembered(lambda: self._chosen(logits.detach(), losses))
        scores: Tensor = _Scores.apply(logits, experts, shares, self.kind, losses.share)
        return scores, experts

    def _chosen(self, logits: Tensor, losses: Losses) -> tuple[Tensor, Tensor | None]:
        """The experts of every token, `[s/t, b, K]`; for the balance loss, E · f of every sequence, `[b, E]`."""
        if self.kind.force_balance:
            experts = in_turn(logits, self.active)
        else:
            experts = best(self._choosable(logits), self.active)
        if not self.kind.balance_loss or not torch.is_grad_enabled():
            return experts, None
        counts = rows_of_experts(experts.transpose(0, 1).flatten(1), logits.shape[-1])  # b E
        for group in losses.groups:
            dist.all_reduce(counts, group=group)
        choices = counts[:1].sum()  # as many in all sequences
        return experts, counts.to(logits.dtype) * logits.shape[-1] / choices

    def _choosable(self, logits: Tensor) -> Tensor:
        """Values by which experts are chosen, `[…, E]`: −∞ for those of groups that are not."""
        kind = self.kind
        found = logits if kind.scores == "softmax" else logits.sigmoid()
        if kind.correction_rate is not None:
            found = (found.softmax(-1) if kind.scores == "softmax" else found) + self.correction.to_local()
        if kind.active_groups == kind.groups:
            return found
        of_groups = found.unflatten(-1, (kind.groups, -1))
        sums = of_groups.sort(dim=-1, descending=True).values[..., : 2 if kind.scores == "sigmoid" else 1].sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best(sums, kind.active_groups), True)
        return of_groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)

    def count(self, load: Tensor) -> None:
        """Add to `load` the tokens `[E]` that have chosen each expert."""
        self.load = load if self.load is None else self.load + load

    @torch.no_grad()
    def correct(self, load: Tensor, used: Tensor) -> None:
        """Correct the choice after a step: raise it for experts with less than their share, lower it for others.

        load: `[E]`, int64, of the whole batch. used: 0 leaves all as it is, 1 does not. The sign is one of whole
        numbers, so it depends on no order of sums.
        """
        assert self.kind.correction_rate is not None
        short = (load.sum() - load * len(load)).sign()
        self.correction.to_local().add_(short * used, alpha=self.kind.correction_rate)


def best(values: Tensor, count: int) -> Tensor:
    """Numbers of the `count` highest values, `[…, count]`, highest first, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def in_turn(logits: Tensor, active: int) -> Tensor:
    """Experts `[s/t, b, K]`, which tokens take in turn."""
    *tokens, count = logits.shape
    choices = torch.arange(tokens[0] * tokens[1] * active, device=logits.device)
    return (choices % count).view(*tokens, active)


def scores_of(logits: Tensor, experts: Tensor, kind: layers.Router) -> Tensor:
    """The scores of the chosen experts, `[…, K]`, of logits `[…, E]`."""
    of_chosen = logits.gather(-1, experts)
    if kind.scores == "softmax":
        found = of_chosen.softmax(-1) if kind.normalize else logits.softmax(-1).gather(-1, experts)
    else:
        found = of_chosen.sigmoid()
        found = found / (found.sum(-1, keepdim=True) + SIGMOID_EPS) if kind.normalize else found
    return found if kind.scale == 1 else found * kind.scale


def losses_of(logits: Tensor, shares: Tensor | None, kind: layers.Router) -> Tensor:
    """The sum over tokens of both losses, of logits `[s/t, b, E]`. shares: E · f `[b, E]`."""
    total = logits.new_zeros(())
    if shares is not None:
        scores = logits.softmax(-1) if kind.scores == "softmax" else logits.sigmoid()
        total = total + kind.balance_loss * (scores / scores.sum(-1, keepdim=True) * shares).sum()
    if kind.z_loss:
        total = total + kind.z_loss * logits.logsumexp(-1).square().sum()
    return total


class _Scores(torch.autograd.Function):
    """`scores_of`, whose backward adds the gradient of share · `losses_of`. Logits and choices are kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, experts: Tensor, shares: Tensor | None, kind: layers.Router, share: float
    ) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.experts, ctx.shares, ctx.kind, ctx.share = experts, shares, kind, share
        return scores_of(logits, experts, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            objective = (scores_of(leaf, ctx.experts, ctx.kind) * grad).sum()
            if ctx.shares is not None or ctx.kind.z_loss:
                objective = objective + ctx.share * losses_of(leaf, ctx.shares, ctx.kind)
            (found,) = torch.autograd.grad(objective, leaf)
        return found, None, None, None, None
