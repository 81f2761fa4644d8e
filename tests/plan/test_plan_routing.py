"""Texts on choices of experts that routers do not make, or do not learn."""

from dataclasses import replace

import pytest

from megalite.config.model_schema import Adapter, Experts, Model
from megalite.config.schema import Config
from megalite.plan.routing import routing_notes


@pytest.mark.parametrize(
    ("experts", "event", "told"),
    [
        (None, None, ""),
        (Experts(8, 2), None, ""),
        (Experts(8, 1, normalize=False), None, ""),
        (Experts(8, 2, force_balance=True), "experts_in_turn", "tokens take experts in turn, whatever routers say"),
        (Experts(8, 1, force_balance=True), "experts_in_turn", "tokens take experts in turn, whatever routers say"),
        (Experts(8, 1), "routers_untaught", "so nothing trains routers; normalize=false"),
        (Experts(8, 1, scores="sigmoid", z_loss=0.1), "routers_untaught", "so z_loss alone trains routers"),
        (Experts(8, 1, balance_loss=0.1, z_loss=0.1), "routers_untaught", "so balance_loss and z_loss alone trains"),
    ],
)
def test_what_routers_do_not_learn_is_told(experts: Experts | None, event: str | None, told: str) -> None:
    notes = routing_notes(Config(model=Model(experts=experts)))
    assert list(notes) == ([] if event is None else [event])
    assert told in "".join(notes.values())


def test_routers_beside_an_adapter_are_not_trained_anyway() -> None:
    config = Config(model=Model(experts=Experts(8, 1)))
    assert routing_notes(config)
    assert routing_notes(replace(config, adapter=Adapter())) == {}
