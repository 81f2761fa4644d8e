"""The vocabulary of pipeline schedules: actions, exchanges, and the table that arranges them.

Stages are numbered through the whole model, 0 to stages − 1. For stage s and micro-batch i:

    F(s, i)       forward: takes the output of F(s − 1, i)
    B(s, i)       backward: takes what F(s, i) kept, and the gradient made by stage s + 1
    I(s, i)       the half of B that makes the gradient of the stage's input, which stage s − 1 waits for
    W(s, i)       the other half, the gradients of the stage's weights: any time after I(s, i)
    SEND_F(s, i)  sends the output of stage s                    and meets RECV_F(s + 1, i)
    RECV_F(s, i)  receives the input of stage s                  and meets SEND_F(s − 1, i)
    SEND_B(s, i)  sends the gradient of the input of stage s     and meets RECV_B(s − 1, i)
    RECV_B(s, i)  receives the gradient of the output of stage s and meets SEND_B(s + 1, i)

`stage` is thus always a stage of the rank that runs the action. A table may also say when the data-parallel
ranks put together and take apart the parameters of a stage; `micro` is then that of the compute it is for:

    GATHER(s, i)   starts to gather the weights of stage s; compute on s waits for them
    RESHARD(s, i)  frees the gathered weights
    REDUCE(s, i)   starts to reduce and scatter the gradients that stage s has accumulated
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megalite.base.errors import InputError, listing


class Kind(StrEnum):
    """Kind of an action; the docstring of this file defines each."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - with W, the letters of torch's schedules; the paper's B is our I
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"

    __hash__ = str.__hash__  # an enum's own hashes its name, in Python: schedules look up millions


COMPUTE = _F, _B, _I, _W = Kind.F, Kind.B, Kind.I, Kind.W  # looking up a member of an enum takes longer than a name
MAX_ACTIONS = 1_000_000  # actions of a schedule, all ranks together; to make and check them takes some ten seconds
SEND_KINDS = (Kind.SEND_F, Kind.SEND_B)
SHARDING = (Kind.GATHER, Kind.RESHARD, Kind.REDUCE)
SENDS_BY_KIND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
OTHER_SIDE = {  # kind of a transfer -> the kind at its other side, and where the stage there is relative to this one
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}


Name = tuple[Kind, int, int]  # an Action as a plain tuple: equal to it, and made in a quarter of the time


class Action(NamedTuple):
    """One step of one micro-batch on one stage; a tuple, for tables of millions."""

    kind: Kind
    stage: int  # 0 to stages − 1, counted through all ranks
    micro: int  # micro-batch, 0 to micro_batches − 1

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def is_transfer(self) -> bool:
        return self.kind in OTHER_SIDE

    @property
    def makes_weight_gradients(self) -> bool:
        return self.kind in (Kind.B, Kind.W)

    @property
    def result(self) -> Name:
        """The name of what a compute action makes. B and I make the same gradient, which is named after B."""
        kind, stage, micro = self
        return (_B, stage, micro) if kind is _I else self

    def inputs(self, stages: int) -> tuple[Name, ...]:
        """The results, on any rank, that this action needs before it can run."""
        kind, stage, micro = self
        if kind is _F:
            return ((_F, stage - 1, micro),) if stage > 0 else ()
        if kind is _B or kind is _I:
            forward = (_F, stage, micro)
            return (forward, (_B, stage + 1, micro)) if stage < stages - 1 else (forward,)
        if kind is _W or kind is Kind.SEND_B:
            return ((_B, stage, micro),)
        return ((_F, stage, micro),) if kind is Kind.SEND_F else ()

    @property
    def send(self) -> "Action":
        """The transfer that carries the result of this F, B or I."""
        kind, stage, micro = self
        return Action(SENDS_BY_KIND[kind], stage, micro)

    @property
    def peer_stage(self) -> int:
        """The stage on the other side of a transfer."""
        return self.stage + OTHER_SIDE[self.kind][1]

    @property
    def matching(self) -> "Action":
        """The action on the other side of a transfer."""
        kind, stage, micro = self
        there, step = OTHER_SIDE[kind]
        return Action(there, stage + step, micro)

    @property
    def transfer(self) -> "Action":
        """The sending action of a transfer: one name for both of its sides."""
        return self if self.kind in SEND_KINDS else self.matching

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro})"


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank posts together, as one batch.

    Neighbours may send to each other at the same time, as in the steady state of 1F1B; posted one by one, each would
    wait for the other to receive. Transfers between two ranks carry no label and match in the order of posting. So
    `actions` is sorted by `transfer`, which gives the same order on both sides. Raises InputError for an action that is
    no transfer.
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        others = [str(action) for action in self.actions if action.kind not in OTHER_SIDE]
        if others:
            raise InputError(f"an exchange holds only transfers, not {' and '.join(others)}")
        if len(self.actions) > 1:
            object.__setattr__(self, "actions", tuple(sorted(self.actions, key=lambda action: action.transfer)))

    def __str__(self) -> str:
        return listing(self.actions, "and")


Program = tuple[Action | Exchange, ...]
Orders = tuple[tuple[Action, ...], ...]  # the compute actions of every rank
Times = tuple[tuple[float, float, float, float], ...]  # by stage: how long F, B, I and W take


@dataclass(frozen=True)
class Table:
    """A pipeline schedule: what every pipeline rank does, in order.

    In a program, compute and sharding are items by themselves, and transfers are only inside exchanges. For every stage
    and micro-batch there is an F, and either a B or an I and a W.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]  # stage -> the pipeline rank that owns it
    programs: tuple[Program, ...]  # one for every pipeline rank
    times: Times | None = None  # times that its order is made for; None: UNIT of `simulate`
    paired: bool = False  # ranks compute the pairs of `pairs_of` side by side: both begin when all inputs are there

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def splits_backward(self) -> bool:
        return any(action.kind is Kind.W for order in self.orders for action in order)

    @cached_property
    def orders(self) -> Orders:
        """The compute actions of every rank, in order."""
        return tuple(
            tuple(item for item in program if isinstance(item, Action) and item.is_compute) for program in self.programs
        )

    @cached_property
    def pairs(self) -> dict[Action, Action]:
        """By F, the B beside which it is computed."""
        return pairs_of(self.orders) if self.paired else {}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns."""
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        found: tuple[list[int], ...] = tuple([] for _ in self.programs)
        for stage, owner in enumerate(self.placement):
            found[owner].append(stage)
        return tuple(map(tuple, found))

    def rank(self, action: Action) -> int:
        """The rank that runs `action`."""
        return self.placement[action.stage]

    def peer(self, action: Action) -> int:
        """The rank on the other side of the transfer `action`."""
        return self.placement[action.peer_stage]


def inputs_of(action: Action, beside: Action | None, stages: int) -> tuple[Name, ...]:
    """The results, on any rank, that must be there before `action` runs, with the action `beside` it, if any."""
    own = action.inputs(stages)
    return own if beside is None else own + beside.inputs(stages)


def pairs_of(orders: Sequence[Sequence[Action]]) -> dict[Action, Action]:
    """By F, the B of another stage that follows it in an order of compute: neither needs the other."""
    return {
        first: second
        for order in orders
        for first, second in pairwise(order)
        if first.kind is _F and second.kind is _B and first.stage != second.stage
    }
