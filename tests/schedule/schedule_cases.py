"""Tables to test with: generated, random and mutated; and an interpreter that really passes data around."""

from collections import defaultdict, deque
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from megalite.schedule.actions import COMPUTE, SHARDING, Action, Exchange, Kind, Table
from megalite.schedule.communication import add_sharding, communicate
from megalite.schedule.generate import NAMES, V_SCHEDULES, build

Item = Action | Exchange

ranks = st.integers(1, 8)
micro_batches = st.integers(1, 32)
names = st.sampled_from(["gpipe", "1f1b"])  # one stage per rank, backward whole
randoms = st.integers(0, 2**32).map(Random)


def tables(ranks: int = 8, micro_batches: int = 32, stages: int = 4) -> st.SearchStrategy[Table]:
    """Every generated schedule of up to these sizes."""

    def sized(name: str) -> st.SearchStrategy[Table]:
        v = st.integers(1, stages) if name == "interleaved_1f1b" else st.sampled_from([None, 1 + (name in V_SCHEDULES)])
        return st.builds(build, st.just(name), st.integers(1, ranks), st.integers(1, micro_batches), v)

    return st.sampled_from(NAMES).flatmap(sized)


def actions_of(item: Item) -> tuple[Action, ...]:
    return item.actions if isinstance(item, Exchange) else (item,)


def with_program(table: Table, rank: int, program: list[Item]) -> Table:
    return replace(table, programs=(*table.programs[:rank], tuple(program), *table.programs[rank + 1 :]))


def free_table(random: Random) -> Table:
    """A small table with any placement and any order of compute that can run at all."""
    stages, m = random.randint(1, 6), random.randint(1, 4)
    placement = [random.randrange(random.randint(1, 4)) for _ in range(stages)]
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    ready = [Action(Kind.F, 0, micro) for micro in range(m)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        orders[placement[action.stage]].append(action)
        backward = random.choice([Kind.B, Kind.I])
        if action.kind == Kind.F and action.stage < stages - 1:
            ready.append(action._replace(stage=action.stage + 1))
        elif action.kind == Kind.F:
            ready.append(action._replace(kind=backward))
        elif action.kind in (Kind.B, Kind.I) and action.stage > 0:
            ready.append(action._replace(kind=backward, stage=action.stage - 1))
        if action.kind == Kind.I:
            ready.append(action._replace(kind=Kind.W))
    return Table("free", m, tuple(placement), communicate(orders, placement))


small_tables = st.one_of(tables(4, 6, 3), randoms.map(free_table))
sharded_tables = st.builds(add_sharding, small_tables, gather=st.booleans(), reduce_each=st.booleans())


def mutate(table: Table, random: Random) -> Table:
    """The table with one thing changed at random, which may or may not break it."""
    rank = random.choice([rank for rank, program in enumerate(table.programs) if program])
    program = list(table.programs[rank])
    at, to = random.randrange(len(program)), random.randrange(len(program))
    transfers = [action for action in actions_of(program[at]) if action.is_transfer]
    following = program[at + 1] if at + 1 < len(program) else None
    match random.choice(["drop", "repeat", "swap", "move", "move away", "drop transfer", "split", "merge"]):
        case "drop":
            del program[at]
        case "repeat":
            program.insert(to, program[at])
        case "swap":
            program[at], program[to] = program[to], program[at]
        case "move":
            program.insert(to, program.pop(at))
        case "move away":
            item = program.pop(at)
            table = with_program(table, rank, program)
            rank = random.randrange(table.ranks)
            program = list(table.programs[rank])
            program.insert(random.randint(0, len(program)), item)
        case "drop transfer" if transfers:
            transfers.pop(random.randrange(len(transfers)))
            program[at] = Exchange(tuple(transfers))
        case "split" if transfers:
            random.shuffle(transfers)
            program[at : at + 1] = [Exchange((action,)) for action in transfers]
        case "merge" if transfers and isinstance(following, Exchange):
            program[at : at + 2] = [Exchange((*transfers, *following.actions))]
    return with_program(table, rank, program)


def runs(table: Table) -> bool:
    """Whether ranks that pass real data, by blocking exchanges, get through `table` with the right result.

    As with NCCL, a transfer carries no label: the n-th send from one rank to another meets its n-th receive.
    """
    Value = tuple[str, int, int]  # the output ("F") of a stage, the gradient ("B") of its input or ("W") its weights
    kinds = {action.kind for program in table.programs for item in program for action in actions_of(item)}
    sharded, gathers = not kinds.isdisjoint(SHARDING), Kind.GATHER in kinds
    whole: list[set[int]] = [set() for _ in table.programs]  # stages whose weights are gathered
    unreduced: list[set[int]] = [set() for _ in table.programs]  # stages with gradients
    held: list[set[Value]] = [set() for _ in table.programs]
    wires: defaultdict[tuple[int, int], tuple[deque[Value], deque[Value]]] = defaultdict(lambda: (deque(), deque()))
    waiting = [0] * table.ranks
    position = [0] * table.ranks

    def succeeds(rank: int, action: Action) -> bool:
        stage, micro, last = action.stage, action.micro, table.stages - 1
        if table.placement[stage] != rank:
            return False
        if action.kind in COMPUTE:
            needed: set[Value] = set()
            if action.kind == Kind.F:
                made, needed = {("F", stage, micro)}, {("F", stage - 1, micro)} if stage > 0 else set()
            elif action.kind == Kind.W:
                made, needed = {("W", stage, micro)}, {("B", stage, micro)}
            else:
                made = {(what, stage, micro) for what in ("BW" if action.kind == Kind.B else "B")}
                needed = {("F", stage, micro)} | ({("B", stage + 1, micro)} if stage < last else set())
            fine = needed <= held[rank] and not made & held[rank] and (not gathers or stage in whole[rank])
            held[rank] |= made
            if ("W", stage, micro) in made:
                unreduced[rank].add(stage)
            return fine
        if action.kind in SHARDING:
            fine = stage in (unreduced if action.kind == Kind.REDUCE else whole)[rank]
            if action.kind == Kind.GATHER:
                fine = not fine
                whole[rank].add(stage)
            else:
                (unreduced if action.kind == Kind.REDUCE else whole)[rank].discard(stage)
            return fine
        waiting[rank] += 1
        direction, what = action.kind.split("_")
        onward = 1 if what == "F" else -1
        if direction == "SEND":
            wires[rank, table.placement[stage + onward]][0].append((what, stage, micro))
            return (what, stage, micro) in held[rank]
        wires[table.placement[stage - onward], rank][1].append((what, stage - onward, micro))
        return True

    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(table.programs):
            if not waiting[rank] and position[rank] < len(program):
                if not all(succeeds(rank, action) for action in actions_of(program[position[rank]])):
                    return False
                position[rank] += 1
                moving = True
        for (sender, receiver), (sends, receives) in wires.items():
            while sends and receives:
                value, expected = sends.popleft(), receives.popleft()
                if value != expected or value in held[receiver]:
                    return False
                held[receiver].add(value)
                waiting[sender] -= 1
                waiting[receiver] -= 1

    everything = {(what, s, i) for what in "FBW" for s in range(table.stages) for i in range(table.micro_batches)}
    computed = {value for rank, values in enumerate(held) for value in values if table.placement[value[1]] == rank}
    finished = position == [len(program) for program in table.programs] and not any(waiting)
    return finished and computed == everything and not any(whole) and not (sharded and any(unreduced))
