"""Adds to an order of compute what it needs: transfers between ranks, and sharding of weights and gradients."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from megalite.schedule.actions import SENDS_BY_KIND, Action, Exchange, Kind, Orders, Program, Table, Times, pairs_of
from megalite.schedule.simulate import Time, cost_of, execute


def communicate(
    orders: Orders, placement: Sequence[int], times: Times | None = None, paired: bool = False
) -> tuple[Program, ...]:
    """Programs of the compute `orders`, with the transfers between ranks that they need.

    The orders run on a clock: compute takes its time of `times`, or else its UNIT, a transfer takes none, and a result
    is sent when it is ready. All that a rank sends or receives at one time is one exchange. So all ranks meet in
    exchanges in the order of one clock, and cannot deadlock even if every exchange blocks until its last transfer is
    done. If the clock is right, no exchange that is ready waits for one that is not. paired: as in `Table`; what
    arrives during a pair is posted before it. Raises InputError if the orders themselves cannot make progress.
    """
    pairs = pairs_of(orders) if paired else {}
    spans = execute(orders, placement, cost_of(times), pairs=pairs)
    ends = {action: end for lane in spans for action, _, end in lane} if pairs else {}
    transfers: list[defaultdict[Time, list[Action]]] = [defaultdict(list) for _ in orders]
    for sender, lane in enumerate(spans):
        for action, _, own_end in lane:
            if action.kind in SENDS_BY_KIND:
                end = ends[pairs[action]] if action in pairs else own_end
                send = action.send
                taker = send.peer_stage
                if 0 <= taker < len(placement) and placement[taker] != sender:
                    transfers[sender][end].append(send)
                    transfers[placement[taker]][end].append(send.matching)

    def program(rank: int) -> Program:
        inside = [(start, ends[pairs[action]]) for action, start, _ in spans[rank] if action in pairs]

        def posted(tick: Time) -> Time:
            begun = bisect_left(inside, tick, key=itemgetter(0))  # pairs that have begun before
            return inside[begun - 1][0] if begun and tick < inside[begun - 1][1] else tick

        timed: list[tuple[Time, Action | Exchange]] = [(end, action) for action, _, end in spans[rank]]
        timed += [(posted(tick), Exchange(tuple(actions))) for tick, actions in sorted(transfers[rank].items())]
        # The sort is stable: at one tick, compute that ends comes before the exchange that sends its result.
        return tuple(item for _, item in sorted(timed, key=itemgetter(0)))

    return tuple(program(rank) for rank in range(len(orders)))


def add_sharding(table: Table, gather: bool, reduce_each: bool) -> Table:
    """`table`, which has no sharding yet, with sharding as actions of its own.

    gather: a stage is gathered whole and once a step, from one compute action before its first use, so that it overlaps
    with compute, until after its last. Without `gather`, whoever runs a stage gathers and frees its layers one by one.
    reduce_each: reduce gradients after every backward, which frees them sooner, and not once a step.
    """
    programs = zip(table.programs, table.orders, strict=True)
    return replace(
        table, programs=tuple(_with_sharding(program, order, gather, reduce_each) for program, order in programs)
    )


def _with_sharding(program: Program, order: Sequence[Action], gather: bool, reduce_each: bool) -> Program:
    before: defaultdict[Action, list[Action]] = defaultdict(list)
    after: defaultdict[Action, list[Action]] = defaultdict(list)
    used: defaultdict[int, list[int]] = defaultdict(list)
    for index, action in enumerate(order):
        used[action.stage].append(index)
    for uses in used.values():
        gradients = [order[index] for index in uses if order[index].makes_weight_gradients]
        for action in gradients if reduce_each else gradients[-1:]:
            after[action].append(action._replace(kind=Kind.REDUCE))
        if gather:
            first, last = order[uses[0]], order[uses[-1]]
            before[order[max(0, uses[0] - 1)]].append(first._replace(kind=Kind.GATHER))
            after[last].append(last._replace(kind=Kind.RESHARD))
    return tuple(
        part
        for item in program
        for part in ((*before.get(item, ()), item, *after.get(item, ())) if isinstance(item, Action) else (item,))
    )
