"""Where the plan of a configuration places the transfers of its pipeline."""

from collections.abc import Callable
from functools import cache

import pytest

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.plan.automatic import costs_of
from megalite.plan.pipeline import table_of
from megalite.schedule.actions import Action, Exchange, Kind, Table
from megalite.schedule.generate import build
from megalite.schedule.simulate import COLUMN, simulate


def configured(schedule: str, layers: int) -> Config:
    keys = [f"model.layers={layers}", "parallel.pp=4", "parallel.dp_shard=1", "batch.micro=1", "batch.global=16"]
    return check(load(["llama3_8b"], [*keys, f"parallel.pipeline.schedule={schedule}"]), 4)


def end_in_turn(table: Table, cost: Callable[[Action], float]) -> float:
    """When the last compute ends, where a rank's exchanges run one after another.

    An exchange begins after the compute before it, and ends when it has begun on all ranks that take part.
    """
    own = [[item for item in program if isinstance(item, Exchange) or item.is_compute] for program in table.programs]
    at = {
        (rank, action): index
        for rank, items in enumerate(own)
        for index, item in enumerate(items)
        for action in (item.actions if isinstance(item, Exchange) else (item,))
    }

    @cache
    def begun(rank: int, index: int) -> tuple[float, float]:
        """Ends of compute and of exchanges before an item."""
        if index == 0:
            return 0.0, 0.0
        computed, sent = begun(rank, index - 1)
        item = own[rank][index - 1]
        if isinstance(item, Exchange):
            return computed, met(rank, index - 1)
        arrived = [met(rank, at[rank, source]) for source in received(item) if (rank, source) in at]
        return max(computed, *arrived, 0.0) + cost(item), sent

    @cache
    def met(rank: int, index: int) -> float:
        item = own[rank][index]
        assert isinstance(item, Exchange)
        peers = [(table.peer(action), action.matching) for action in item.actions]
        return max(max(begun(other, at[other, action])) for other, action in [(rank, item.actions[0]), *peers])

    def received(action: Action) -> list[Action]:
        kinds = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
        return [action._replace(kind=kinds[action.kind])] if action.kind in kinds else []

    return max(begun(rank, len(items))[0] for rank, items in enumerate(own))


@pytest.mark.parametrize("layers", [16, 18])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipev"])
def test_no_exchange_waits_for_another(schedule: str, layers: int) -> None:
    """Stages differ, as the last has the head, and halves of backward do; times are those of FLOPs, as a plan knows."""
    config = configured(schedule, layers)
    times = [stage.times for stage in costs_of(config)]

    def cost(action: Action) -> float:
        return times[action.stage][COLUMN[action.kind]] if action.is_compute else 0.0

    table = table_of(config)
    assert end_in_turn(table, cost) == simulate(table, cost).makespan
    blind = build(schedule, 4, 16)  # its transfers are placed as if all stages and halves took equally long
    assert blind.orders == table.orders
    if schedule == "zb_h1":
        assert end_in_turn(blind, cost) > 1.01 * simulate(blind, cost).makespan
