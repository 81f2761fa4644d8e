"""Pipeline schedules as pure functions: an order of compute actions, then the transfers it calls for."""

from collections import defaultdict
from collections.abc import Sequence

from megalite.config.errors import InputError
from megalite.schedule.actions import Action, Exchange, Kind, Program, Table
from megalite.schedule.simulate import Time, execute

Orders = tuple[tuple[Action, ...], ...]  # compute actions of every rank


def build(name: str, p: int, m: int, v: int = 1) -> Table:
    """The schedule `name` for p pipeline ranks, m micro-batches and v virtual stages per rank.

    Raises InputError for an unknown name or a size the schedule cannot have.
    """
    if name not in ORDERS:
        raise InputError(f"parallel.pipeline.schedule={name!r} is unknown; choose one of {', '.join(ORDERS)}")
    if p < 1 or m < 1:
        raise InputError(f"a pipeline needs at least 1 rank and 1 micro-batch, not {p} and {m}")
    if v != 1:
        raise InputError(f"parallel.pipeline.schedule={name!r} has 1 stage per rank, not {v} virtual stages")
    placement = tuple(range(p))
    return Table(name, m, placement, communicate(ORDERS[name](p, m), placement))


def gpipe(p: int, m: int) -> Orders:
    """All forwards, then all backwards; a rank holds m micro-batches (Huang et al., arXiv 1811.06965).

    Backwards run in the order of forwards, so gradients accumulate in the same order as under 1F1B.
    """
    return tuple(
        tuple(Action(kind, stage, micro) for kind in (Kind.F, Kind.B) for micro in range(m)) for stage in range(p)
    )


def one_f_one_b(p: int, m: int) -> Orders:
    """Each backward as early as possible; rank r holds min(m, p − r) micro-batches (PipeDream-flush, arXiv 2006.09503).

    Rank r runs ahead by p − r − 1 forwards, alternates forward and backward, then drains its backwards.
    """

    def order(stage: int) -> tuple[Action, ...]:
        forward = [Action(Kind.F, stage, micro) for micro in range(m)]
        backward = [Action(Kind.B, stage, micro) for micro in range(m)]
        ahead = min(m, p - stage - 1)
        steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
        return (*forward[:ahead], *steady, *backward[m - ahead :])

    return tuple(order(stage) for stage in range(p))


def forward_only(p: int, m: int) -> Orders:
    """Evaluation: every stage forwards the micro-batches in turn."""
    return tuple(tuple(Action(Kind.F, stage, micro) for micro in range(m)) for stage in range(p))


ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "forward": forward_only}


def communicate(orders: Sequence[Sequence[Action]], placement: Sequence[int]) -> tuple[Program, ...]:
    """Programs that add to compute `orders` the transfers between ranks that they call for.

    The orders run on a clock: a compute action takes one tick, a transfer none, and a result is sent at the tick
    it is ready. All that a rank sends or receives at one tick is one exchange. The ranks thus meet in exchanges
    in the order of one common clock, so they cannot deadlock even if every exchange blocks until its last
    transfer is done. Raises InputError if the orders themselves cannot make progress.
    """
    spans = execute(orders, placement, cost=lambda action: 1)
    transfers: list[defaultdict[Time, list[Action]]] = [defaultdict(list) for _ in orders]
    for action in spans:
        for source in action.inputs(len(placement)):
            sender, receiver = placement[source.stage], placement[action.stage]
            if sender != receiver:
                tick = spans[source].end
                transfers[sender][tick].append(source.send)
                transfers[receiver][tick].append(source.send.matching)

    def program(rank: int) -> Program:
        timed: list[tuple[Time, Action | Exchange]] = [(spans[action].end, action) for action in orders[rank]]
        timed += [(tick, Exchange(tuple(actions))) for tick, actions in transfers[rank].items()]
        # The sort is stable: at one tick, compute that ends comes before the exchange that sends its result.
        return tuple(item for _, item in sorted(timed, key=lambda entry: entry[0]))

    return tuple(program(rank) for rank in range(len(orders)))
