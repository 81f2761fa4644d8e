"""Every collective and every message of a training step of one rank: what, over which axis, how large and how often.

Evaluation, checkpoints and start-up are not part of a step. Layers are taken as they run without `train.compile`.
"""

from collections import Counter
from functools import cache

from megalite.base.stop_signals import STOP_SIGNALS
from megalite.config.layers import LayerKind
from megalite.plan.model.weights import embedding
from megalite.plan.muon import MuonPlan, Piece, moves, stage_matrices, working_bytes
from megalite.plan.parts.transfers import TYPE_NAMES, Traffic, Transfer, Transfers, axis_sizes, over, stage_axis
from megalite.plan.recompute_modes import Mode
from megalite.plan.resolved import Plan
from megalite.plan.traffic.layers import LayerTraffic
from megalite.plan.traffic.weights import Gathering, WeightTraffic, share
from megalite.schedule.actions import Action, Exchange, Kind
from megalite.schedule.reductions import reductions


def step_traffic(plan: Plan, rank: int, m: int) -> list[Traffic]:
    """The traffic of global rank `rank` in a training step of `m` micro-batches.

    Raises InputError for a schedule that cannot run.
    """
    sizes = axis_sizes(plan.config)
    found = StepTransfers(plan, rank, m).run()
    return [
        Traffic(transfer.kind, transfer.axis, sizes[transfer.axis], transfer.bytes, transfer.dtype, times, purpose)
        for (transfer, purpose), times in found.items()
    ]


class StepTransfers:
    """A step of `m` micro-batches on one rank, action by action."""

    def __init__(self, plan: Plan, rank: int, m: int) -> None:
        self.plan, self.config, self.table = plan, plan.config, plan.table(m)
        self.at = self.config.parallel.layout.coordinates(rank)
        self.pp = self.at["pp"]
        self.layers = LayerTraffic(self.config, self.at["cp"])
        self.weights = {stage: WeightTraffic(plan, stage) for stage in plan.stages_of(self.pp)}
        self.reductions = reductions(self.table, self.pp)
        self.gathering = {stage: Gathering(weights.groups) for stage, weights in self.weights.items()}
        self.added_up: set[int] = set()  # stages with gradients that wait for a later reduction
        self.found: Transfers = Counter()
        self.forward, self.backward = cache(self._forward), cache(self._backward)
        self.put_off = cache(self._weight_gradients)

    def run(self) -> Transfers:
        for item in self.table.programs[self.pp]:
            if isinstance(item, Exchange):
                self._exchange(item)
                continue
            weights, gathering = self.weights[item.stage], self.gathering[item.stage]
            match item.kind:
                case Kind.F:
                    if weights.states.frees:
                        self.found.update(weights.gathers(gathering.forward(), "forward"))
                    self.found.update(self.forward(item.stage))
                case Kind.B | Kind.I:
                    if weights.states.frees:
                        self.found.update(weights.gathers(gathering.backward(), "backward"))
                    self.found.update(self.backward(item.stage, item.kind is Kind.I))
                    self._reduce(item)
                case Kind.W:
                    self.found.update(self.put_off(item.stage))
                    self._reduce(item)
                case Kind.GATHER:
                    self.found.update(weights.gathers(weights.groups, "step"))
        return self.found + self._partial_sums() + self._shared() + self._targets() + self._signs() + self._muon()

    def _reduce(self, action: Action) -> None:
        """Add what FSDP2 reduces at the end of a backward action."""
        stage, kind, reduction = action.stage, action.kind, self.reductions[action]
        if not self.weights[stage].states.managed:
            return
        if not reduction.now:
            self.added_up |= {stage} if kind is not Kind.W else set()
            return
        matrices_only = kind is Kind.W and stage not in self.added_up
        self.found.update(self.weights[stage].reduces(reduction.replicas, matrices_only))
        self.added_up.discard(stage)

    def _forward(self, stage: int) -> Transfers:
        found: Transfers = Counter()
        if stage == 0:
            found += self.layers.embedding()[0]
        for (kind, _), times in self._layers(stage).items():
            found += _times(self.layers.forward(kind), times)
        return found + self.layers.head()[0] if stage == self.plan.stages - 1 else found

    def _backward(self, stage: int, split: bool) -> Transfers:
        found: Transfers = Counter()
        if stage == 0:
            found += self.layers.embedding()[1]
        for (kind, mode), times in self._layers(stage).items():
            found += _times(self.layers.backward(kind, mode, split), times)
        return found + self.layers.head()[1] if stage == self.plan.stages - 1 else found

    def _weight_gradients(self, stage: int) -> Transfers:
        kinds = Counter(self.plan.kinds[layer] for layer in self.plan.layers[stage])
        return sum((_times(self.layers.weight_gradients(kind), times) for kind, times in kinds.items()), Counter())

    def _layers(self, stage: int) -> Counter[tuple[LayerKind, Mode]]:
        return Counter(self.plan.recomputed(stage))

    def _exchange(self, exchange: Exchange) -> None:
        sizes = self.layers.sizes
        for action in exchange.actions:
            sends = action == action.transfer
            what = "activations" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "their gradients"
            transfer = Transfer("send" if sends else "receive", "pp", sizes.stream, TYPE_NAMES[sizes.w])
            self.found[transfer, f"pipeline: {what}"] += 1

    def _partial_sums(self) -> Transfers:
        """The one sum over tp of all gradients that are partial sums."""
        if self.config.parallel.tp == 1:
            return Counter()
        (states, *_) = (weights.states for weights in self.weights.values())
        size = sum(weights.partial_bytes(self._shard) for weights in self.weights.values())
        return over("tp", "all_reduce", size, states.p, "gradients: partial sums of norms")

    @property
    def _shard(self) -> int:
        """Position of the rank among those that share the weights of a stage."""
        return self.at["dp_shard"] * self.config.parallel.cp + self.at["cp"] if self.config.parallel.data.sharded else 0

    def _shared(self) -> Transfers:
        """The sum of the gradients of a shared embedding's two copies, if two ranks have them."""
        ends, table = (self.plan.placement[0], self.plan.placement[-1]), embedding(self.config.model)
        shared = self.config.model.shares_embedding and table.trained
        if not shared or self.plan.stages == 1 or ends[0] == ends[1] or self.pp not in ends:
            return Counter()
        rows, width = table.part(self.config.parallel.tp)
        states = self.weights[min(self.weights) if self.pp == ends[0] else max(self.weights)].states
        mine = share(rows, states.shards, self._shard)
        purpose = "gradients: sum over the two copies of the embedding"
        return Counter(
            {
                (Transfer(kind, "pp", mine * width * states.p, TYPE_NAMES[states.p]), purpose): 1
                for kind in ("send", "receive")
            }
        )

    def _targets(self) -> Transfers:
        """The number of targets that each layer of multi-token prediction has in the step."""
        depth = self.config.model.depth
        transfer = Transfer("all_reduce", "world", 8 * depth, "int64")
        return Counter({(transfer, "step: targets of multi-token prediction"): 1} if depth else {})

    def _signs(self) -> Transfers:
        """The square of the gradients' norm, losses, how many ranks each signal has reached, and experts' load."""
        mixtures = [kind.mixture for kind in self.plan.kinds if kind.mixture is not None]
        numbers = 2 + len(STOP_SIGNALS) + self.config.model.depth + sum(mixture.count for mixture in mixtures)
        load = ", tokens of experts" if mixtures else ""
        purpose = f"step: norm of the gradients, loss, requests to stop{load}"
        return Counter({(Transfer("all_reduce", "world", 8 * numbers, "float64"), purpose): 1})

    def _muon(self) -> Transfers:
        config, sizes, found = self.config, axis_sizes(self.config), Transfers()
        if config.optim.name != "muon":
            return found
        owned = [layer for stage in self.weights for layer in self.plan.layers[stage]]
        ranks = sizes["dp_replicate"], sizes["fsdp"], sizes["tp"]
        matrices = stage_matrices(config.model, owned, *ranks, ep=config.parallel.ep)
        if not matrices:
            return found
        each = working_bytes(config)
        plan, position = MuonPlan(matrices, each), self._position()
        for bucket in plan.buckets:
            for pieces, purpose in (
                (plan.gathered(bucket), "optimizer: momentum to the owners of matrices"),
                (plan.returned(bucket), "optimizer: updates from the owners of matrices"),
            ):
                if moves(pieces):
                    size = each * _larger_buffer(pieces, position)
                    found[Transfer("all_to_all", stage_axis(config), size, TYPE_NAMES[each]), purpose] += 1
        return found

    def _position(self) -> int:
        """Position of the rank among the ranks of its stage."""
        layout = self.config.parallel.layout
        return layout.rank(**{**self.at, "pp": 0})


def _larger_buffer(pieces: list[Piece], position: int) -> int:
    """Elements that a rank puts into an exchange or gets out of it, whichever are more."""
    out = sum(piece.elements for piece in pieces if piece.source == position)
    into = sum(piece.elements for piece in pieces if piece.target == position)
    return max(out, into)


def _times(transfers: Transfers, times: int) -> Transfers:
    return Counter({transfer: times * count for transfer, count in transfers.items()})
