"""Checks whether a pipeline schedule is complete, consistent and free of deadlock, whoever made it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, product, starmap

from megalite.base.errors import counted
from megalite.schedule.actions import COMPUTE, SHARDING, Action, Exchange, Kind, Name, Table, inputs_of


def check(table: Table) -> list[str]:
    """Problems of `table`, one readable line each; empty if there are none.

    Transfers count as unbuffered: a send ends only when its receive has been posted.
    """
    return malformed(table) or [
        *uncomputed(table),
        *untransferred(table),
        *too_early(table),
        *crossed(table),
        *deadlock(table),
        *unsharded(table),
    ]


def malformed(table: Table) -> list[str]:
    """Actions that no rank could run. The other checks rely on there being none."""
    if not all(0 <= rank < table.ranks for rank in table.placement):
        return [f"placement {table.placement} names a rank that has no program: there are {table.ranks}"]

    stages = table.stages

    def problem(rank: int, item: Action | Exchange, action: Action) -> str | None:
        if item == action and action.is_transfer:
            return "outside an exchange"
        other = action.peer_stage if action.is_transfer else action.stage
        inside = 0 <= action.stage < stages and 0 <= other < stages and 0 <= action.micro < table.micro_batches
        if not inside:
            size = counted(table.micro_batches, "micro-batch", "micro-batches")
            return f"in a schedule of {counted(table.stages, 'stage')} and {size}"
        return f"whose stage is on rank {table.rank(action)}" if table.rank(action) != rank else None

    return [
        f"rank {rank} has {action} {found}"
        for rank, program in enumerate(table.programs)
        for item in program
        for action in (item.actions if isinstance(item, Exchange) else (item,))
        if (found := problem(rank, item, action))
    ]


def uncomputed(table: Table) -> list[str]:
    """Compute that is missing, repeated, or done both whole and split."""
    found = Counter[Name](chain.from_iterable(table.orders))
    forward, whole, *halves = COMPUTE
    expected: set[Name] = set()
    for stage, micro in product(range(table.stages), range(table.micro_batches)):
        split = [(half, stage, micro) for half in halves]
        expected.add((forward, stage, micro))
        expected.update(split if any(half in found for half in split) else [(whole, stage, micro)])
    return _differences(table, found, expected, "but also I or W of it")


def untransferred(table: Table) -> list[str]:
    """Transfers that are missing, repeated, or within one rank."""
    expected: set[Name] = set()
    for stage in range(1, table.stages):
        if table.placement[stage - 1] != table.placement[stage]:
            ends = (Kind.SEND_F, stage - 1), (Kind.RECV_F, stage), (Kind.SEND_B, stage), (Kind.RECV_B, stage - 1)
            expected.update((kind, at, micro) for kind, at in ends for micro in range(table.micro_batches))
    exchanges = (item for program in table.programs for item in program if isinstance(item, Exchange))
    found = Counter[Name](chain.from_iterable(exchange.actions for exchange in exchanges))
    return _differences(table, found, expected, "but both stages are on that rank")


def _differences(table: Table, found: Counter[Name], expected: set[Name], needless: str) -> list[str]:
    def of(names: Iterable[Name]) -> Iterator[tuple[int, Action]]:
        return ((table.rank(action), action) for action in starmap(Action, sorted(names)))

    return [
        *(f"rank {rank} lacks {action}" for rank, action in of(expected - found.keys())),
        *(f"rank {rank} has {action}, {needless}" for rank, action in of(found.keys() - expected)),
        *(
            f"rank {rank} has {action} {found[action]} times"
            for rank, action in of(name for name, times in found.items() if times > 1)
        ),
    ]


def too_early(table: Table) -> list[str]:
    """Actions that run before their own rank has their inputs."""
    placement, stages = table.placement, table.stages
    early = []
    for rank, program in enumerate(table.programs):
        there: set[Name] = set()  # results, and what has been received
        for item in program:
            actions = item.actions if isinstance(item, Exchange) else (item,)
            for action in actions:
                for source in inputs_of(action, table.pairs.get(action), stages):
                    local = placement[source[1]] == rank
                    need = source if local else Action(*source).send.matching
                    if need not in there:
                        early.append((rank, action, need))
            there.update(action.result for action in actions)
    if not early:
        return []
    makers = {action.result: action for order in table.orders for action in order}
    return [f"rank {rank} runs {action} before {makers.get(need, Action(*need))}" for rank, action, need in early]


def crossed(table: Table) -> list[str]:
    """Transfers that two ranks post in different orders. They carry no label, so data would be swapped."""
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)  # (sender, receiver) -> in order of posting
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for program in table.programs:
        for action in flat(program):
            if action.is_transfer:
                transfer = action.transfer
                posted = sent if action == transfer else received
                posted[table.rank(transfer), table.peer(transfer)].append(transfer)
    problems = []
    for sender, receiver in sorted(sent.keys() & received.keys()):
        if sent[sender, receiver] == received[sender, receiver]:
            continue
        both = set(sent[sender, receiver]) & set(received[sender, receiver])
        sends, receives = ([t for t in posted[sender, receiver] if t in both] for posted in (sent, received))
        differing = [(a, b.matching) for a, b in zip(sends, receives, strict=False) if a != b]
        for send, receive in differing[:1]:
            problems.append(f"rank {sender} posts {send} where rank {receiver} posts {receive}: data would be swapped")
    return problems


def deadlock(table: Table) -> list[str]:
    """List stuck ranks and whom they wait for, if ranks cannot all reach the end of their programs.

    A transfer is done as soon as both its ranks have come to an exchange that contains it. A rank goes on when all
    transfers of its exchange are done. Compute never blocks.
    """
    exchanges = [iter([item for item in program if isinstance(item, Exchange)]) for program in table.programs]
    undone: list[set[Action]] = [set() for _ in table.programs]  # transfers of the exchange where each rank stands
    ready = set(range(table.ranks))
    while ready:
        rank = ready.pop()
        exchange = next(exchanges[rank], None)
        if exchange is None:
            continue
        undone[rank] = set(exchange.actions)
        for action in exchange.actions:
            peer = table.peer(action)
            if action.matching in undone[peer]:
                undone[rank].remove(action)
                undone[peer].remove(action.matching)
                if not undone[peer]:
                    ready.add(peer)
        if not undone[rank]:
            ready.add(rank)

    def position(rank: int) -> str:
        return f"stands at {' and '.join(map(str, sorted(undone[rank])))}" if undone[rank] else "has finished"

    return [
        f"deadlock: rank {rank} waits at {action} for rank {table.peer(action)}, which {position(table.peer(action))}"
        for rank, waiting in enumerate(undone)
        for action in sorted(waiting)[:1]
    ]


def unsharded(table: Table) -> list[str]:
    """Compute on weights that are not gathered, and gradients that are not reduced; none in a table without sharding.

    In a table that gathers nothing, whoever runs a stage gathers its weights.
    """
    kinds = {action.kind for program in table.programs for action in flat(program)}
    if kinds.isdisjoint(SHARDING):
        return []
    gathers = Kind.GATHER in kinds
    return [
        f"rank {rank} {problem}"
        for rank, program in enumerate(table.programs)
        for problem in _unsharded(flat(program), gathers)
    ]


def _unsharded(program: Iterable[Action], gathers: bool) -> Iterator[str]:
    gathered: dict[int, Action] = {}  # by stage
    unreduced: dict[int, Action] = {}  # the newest gradient, by stage
    for action in program:
        stage = action.stage
        if gathers and action.is_compute and stage not in gathered:
            yield f"runs {action} on weights that are not gathered"
        if action.makes_weight_gradients:
            unreduced[stage] = action
        match action.kind:
            case Kind.GATHER:
                if stage in gathered:
                    yield f"has {action} on weights that {gathered[stage]} has gathered"
                gathered[stage] = action
            case Kind.RESHARD:
                if gathered.pop(stage, None) is None:
                    yield f"has {action} on weights that are not gathered"
            case Kind.REDUCE:
                if unreduced.pop(stage, None) is None:
                    yield f"has {action} without a new gradient"
    yield from (f"never frees what {action} has gathered" for action in gathered.values())
    yield from (f"never reduces the gradients up to {action}" for action in unreduced.values())


def flat(items: Iterable[Action | Exchange]) -> Iterator[Action]:
    """The actions of a program, those inside exchanges included."""
    for item in items:
        yield from item.actions if isinstance(item, Exchange) else (item,)
