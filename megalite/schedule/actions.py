"""The vocabulary of pipeline schedules: actions, exchanges, and the table that arranges them.

Stages are numbered through the whole model, 0 to stages − 1. For stage s and micro-batch i:

    F(s, i)       forward: takes the output of F(s − 1, i)
    B(s, i)       backward: takes what F(s, i) kept, and the gradient made by B(s + 1, i)
    SEND_F(s, i)  sends the output of stage s                    and meets RECV_F(s + 1, i)
    RECV_F(s, i)  receives the input of stage s                  and meets SEND_F(s − 1, i)
    SEND_B(s, i)  sends the gradient of the input of stage s     and meets RECV_B(s − 1, i)
    RECV_B(s, i)  receives the gradient of the output of stage s and meets SEND_B(s + 1, i)

`stage` is thus always a stage of the rank that runs the action.
"""

from dataclasses import dataclass
from enum import StrEnum

from megalite.config.errors import InputError


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


SENT_BY = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
OTHER_SIDE = {  # of a transfer: the kind there, and where its stage is relative to this one
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One step of one micro-batch on one stage."""

    kind: Kind
    stage: int  # 0 to stages − 1, counted through all ranks
    micro: int  # micro-batch, 0 to micro_batches − 1

    @property
    def is_compute(self) -> bool:
        return self.kind in SENT_BY

    def inputs(self, stages: int) -> tuple["Action", ...]:
        """The compute actions, on whatever rank, that must have run before this one can."""
        sources: tuple[tuple[Kind, int], ...] = ()
        match self.kind:
            case Kind.F:
                sources = ((Kind.F, self.stage - 1),)
            case Kind.B:
                sources = ((Kind.F, self.stage), (Kind.B, self.stage + 1))
            case Kind.SEND_F:
                sources = ((Kind.F, self.stage),)
            case Kind.SEND_B:
                sources = ((Kind.B, self.stage),)
        return tuple(Action(kind, stage, self.micro) for kind, stage in sources if 0 <= stage < stages)

    @property
    def send(self) -> "Action":
        """The transfer that carries the result of a compute action."""
        return Action(SENT_BY[self.kind], self.stage, self.micro)

    @property
    def peer_stage(self) -> int:
        """The stage on the other side of a transfer."""
        return self.stage + OTHER_SIDE[self.kind][1]

    @property
    def matching(self) -> "Action":
        """The action on the other side of a transfer."""
        return Action(OTHER_SIDE[self.kind][0], self.peer_stage, self.micro)

    @property
    def transfer(self) -> "Action":
        """The sending action of a transfer: one name for both of its sides."""
        return self if self.kind in SENT_BY.values() else self.matching

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro})"


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank posts together, as one batch.

    Posting together is what keeps neighbours that send to each other at the same time (1F1B's steady state)
    from waiting for each other's receive. Transfers between two ranks carry no label, they match in the order
    of posting; so `actions` is sorted by `transfer`, which is the same order on both sides. Raises InputError
    for a compute action.
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        compute = [str(action) for action in self.actions if action.is_compute]
        if compute:
            raise InputError(f"an exchange holds only transfers, not {' and '.join(compute)}")
        object.__setattr__(self, "actions", tuple(sorted(self.actions, key=lambda action: action.transfer)))


Program = tuple[Action | Exchange, ...]


@dataclass(frozen=True)
class Table:
    """A pipeline schedule: what every pipeline rank does, in order.

    Compute actions stand in a program by themselves, transfers only inside exchanges.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]  # stage -> the pipeline rank that owns it
    programs: tuple[Program, ...]  # one for every pipeline rank

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def rank(self, action: Action) -> int:
        """The rank that runs `action`."""
        return self.placement[action.stage]

    def peer(self, action: Action) -> int:
        """The rank on the other side of the transfer `action`."""
        return self.placement[action.peer_stage]
