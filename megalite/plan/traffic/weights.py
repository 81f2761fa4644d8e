"""Transfers of weights and gradients, of one stage: what FSDP2 gathers and reduces; and what is summed over tp.

FSDP2 handles the parameters of a group (the embedding, a layer, the head) as one flat tensor, in which rows of every
parameter are padded to a multiple of the ranks, but for experts that divide in another way (`Weight.shard_dim`). With D
ranks, and w, r and p as in `plan.memory`:

    gather    w bytes for every padded element, over fsdp. zero1, zero2: once a step. zero3: see `Gathering`.
    reduce    r bytes for every padded element that is trained, over fsdp, then 1/D of it over dp_replicate. The
              schedule says when. Where backward is split, only of the parameters whose gradients have been made since
              the last reduction.
    partial   gradients of norms of the residual stream and of single heads are partial sums of tp's ranks. Once a step,
              a rank's parts of all of them are summed together, p bytes for an element.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter

from megalite.config.layers import LayerKind
from megalite.plan.memory.states import States
from megalite.plan.model.weights import embedding_weights, head_weights
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.transfers import TYPE_NAMES, Transfer, Transfers, axis_sizes
from megalite.plan.resolved import Plan


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together."""

    name: str
    weights: tuple[Weight, ...]
    tp: int
    ep: int = 1
    apart: bool = False  # experts that ranks of ep share out, sharded and copied over ranks of their own
    with_stage: bool = False  # gathered as long as the stage is in use, since its first and its last module need it

    def gathered(self, shards: int, each: int) -> int:
        """Bytes on a tensor-parallel rank, `each` for an element that is not in four bits, with padding for `shards`
        ranks."""
        return sum(weight.bytes(weight.padded(shards, self.tp, self.ep), each) for weight in self.weights)

    @property
    def mixed(self) -> bool:
        """Flag: some weights are in four bits, so all are gathered as bytes."""
        return any(weight.four_bits for weight in self.weights)

    def reduced(self, shards: int, matrices_only: bool = False) -> int:
        """Elements of the gradients of trained weights, padded for `shards`. matrices_only: only those that a split
        backward puts off."""
        made = filter(put_off if matrices_only else attrgetter("trained"), self.weights)
        return sum(weight.padded(shards, self.tp, self.ep) for weight in made)

    def recut(self, shards: int) -> int:
        """Elements on a rank of weights that are not sharded along their first dimension."""
        return sum(weight.recut(shards, self.ep) for weight in self.weights)

    def partial(self, shards: int, position: int = 0) -> int:
        """Elements of gradients that are partial sums over tp, on the rank at `position` of `shards`."""
        found = (weight.shape for weight in self.weights if weight.trained and weight.role.copied)
        return sum(share(rows, shards, position) * prod(others) for rows, *others in found)


@dataclass(frozen=True)
class WeightTraffic:
    """The weights and gradients of stage `stage`."""

    plan: Plan
    stage: int

    @cached_property
    def states(self) -> States:
        return States(self.plan)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of the stage in the order in which forward uses them."""
        model, last = self.plan.config.model, self.stage == self.plan.stages - 1
        shared, found = last and model.shares_embedding, []
        if self.stage == 0 or shared:
            found.append(self._group("the embedding", embedding_weights(model).values(), with_stage=shared))
        one = {kind: self._layer(kind) for kind in {self.plan.kinds[layer] for layer in self.plan.layers[self.stage]}}
        found += [group for layer in self.plan.layers[self.stage] for group in one[self.plan.kinds[layer]]]
        if last:
            found.append(self._group("the head", head_weights(model).values()))
        return found

    def gathers(self, groups: Iterable[Group], phase: str) -> Transfers:
        """The gathering of `groups`."""
        each, found = self.states.w, Transfers()
        for group, times in Counter(groups).items():
            axis, shards, _, _ = self._axes(group)
            if shards > 1:
                transfer = Transfer(
                    "all_gather", axis, group.gathered(shards, each), TYPE_NAMES[1 if group.mixed else each]
                )
                found[transfer, f"{phase}: gather of the weights of {group.name}"] += times
        return found

    def reduces(self, replicas: bool, matrices_only: bool) -> Transfers:
        """The reduction of the gradients of all groups.

        replicas: over them too. matrices_only: those of matrices in layers were put off, and those of all else have
        been reduced before.
        """
        each, found = self.states.r, Transfers()
        for group, times in Counter(self.groups).items():
            axis, shards, outer, over = self._axes(group)
            size, purpose = each * group.reduced(shards, matrices_only), f"gradients: sum of those of {group.name}"
            if shards > 1 and size:
                found[Transfer("reduce_scatter", axis, size, TYPE_NAMES[each]), purpose] += times
            if over > 1 and replicas and size:
                found[Transfer("all_reduce", outer, size // shards, TYPE_NAMES[each]), purpose] += times
        return found

    def _axes(self, group: Group) -> tuple[str, int, str, int]:
        """The axis over which a group is sharded, with its ranks, and that of its replicas, with theirs."""
        sizes = axis_sizes(self.plan.config)
        shards, replicas = ("ep_fsdp", "ep_replicate") if group.apart else ("fsdp", "dp_replicate")
        return shards, sizes[shards], replicas, sizes[replicas]

    def partial_bytes(self, position: int) -> int:
        """Bytes of gradients that are partial sums over tp, on the rank at `position` of those that share weights."""
        return self.states.p * sum(group.partial(self.states.shards, position) for group in self.groups)

    def _layer(self, kind: LayerKind) -> list[Group]:
        """The groups of a layer in the order in which forward is done with them: experts that ranks share out first."""
        config = self.plan.config
        apart, weights = Layer(config.model.width, kind).exchanged(config.parallel.ep)
        own = self._group("a layer", weights)
        return [self._group("experts", apart, apart=True), own] if apart else [own]

    def _group(self, name: str, weights: Iterable[Weight], with_stage: bool = False, apart: bool = False) -> Group:
        parallel = self.plan.config.parallel
        return Group(name, tuple(weights), parallel.tp, parallel.ep, apart, with_stage)


class Gathering:
    """Groups of a stage that FSDP2's hooks gather in a step with zero3.

    A group is freed after it was used, one that stays with the stage only after backward. Each is gathered where it is
    needed and not there.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.staying = False  # the groups that stay with the stage are there

    def forward(self) -> list[Group]:
        """Groups that a forward action gathers."""
        gathered, self.staying = self._missing(), True
        return gathered

    def backward(self) -> list[Group]:
        """Groups that a backward action gathers."""
        gathered, self.staying = self._missing(), False
        return gathered

    def _missing(self) -> list[Group]:
        return [group for group in self.groups if not (group.with_stage and self.staying)]


def share(rows: int, shards: int, position: int) -> int:
    """Rows of a parameter that FSDP2 gives the rank at `position` of `shards`."""
    each = -(-rows // shards)
    return min(max(rows - position * each, 0), each)


def put_off(weight: Weight) -> bool:
    """Return whether a split backward puts off the gradient of a weight, as it does for layers' matrices alone."""
    return weight.trained and weight.role.kind is RoleKind.MATRIX
