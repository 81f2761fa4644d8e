"""The moment of peak memory, in words."""

import pytest
from memory_cases import CASES, SHARDED, Overrides, configured

from megalite.plan.memory.moment_text import Instant
from megalite.plan.memory.peak import rank_memory
from megalite.schedule.actions import Action, Exchange, Kind


@pytest.mark.parametrize(
    ("action", "part", "what", "expected"),
    [
        (Action(Kind.F, 0, 3), "the head", "", "forward of the head, micro-batch 3"),
        (Action(Kind.B, 1, 0), "layer 7", "swiglu", "backward of layer 7, swiglu, micro-batch 0"),
        (Action(Kind.W, 2, 5), "", "", "weight gradients of stage 2, micro-batch 5"),
        (Exchange((Action(Kind.SEND_F, 0, 1),)), "", "", "transfers between stages: SEND_F(stage 0, micro-batch 1)"),
        ("update of the weights", "", "", "update of the weights"),
    ],
)
def test_in_words(action: Action | Exchange | str, part: str, what: str, expected: str) -> None:
    assert str(Instant(action, part, what)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1f1b", "backward of layer 2, swiglu, micro-batch 1"),
        ("head in chunks", "forward of the head, micro-batch 0"),
        ("zb_h2", "backward without weight gradients of the embedding, adding up gradients, micro-batch 3"),
        ("capped, ring", "backward of layer 1, attention, micro-batch 1"),
    ],
)
@pytest.mark.usefixtures("older_fsdp")
def test_where_memory_peaks(name: str, expected: str) -> None:
    overrides, pp = CASES[name]
    assert str(rank_memory(configured(overrides), pp).instant) == expected


def test_the_last_micro_batch_stays_the_last() -> None:
    """Steps of many micro-batches are predicted from steps of few."""
    last = Instant(Action(Kind.F, 1, 31), "layer 2")
    assert last.of_last(32, 64) == Instant(Action(Kind.F, 1, 63), "layer 2")
    assert last.of_last(40, 64) == last
    assert Instant("update of the weights").of_last(32, 64) == Instant("update of the weights")


@pytest.mark.parametrize(("pp", "layer"), [(0, 10), (1, 22)])
def test_a_layer_has_its_number_in_the_model(pp: int, layer: int) -> None:
    """Though those in the middle of a stage are taken as one."""
    deep: Overrides = {"model.layers": 24, "parallel.pp": 2, "parallel.pipeline.split": "[12, 12]", **SHARDED}
    config = configured({**deep, "train.recompute": "full", "model.vocab_size": 64, "batch.global": 8})
    assert str(rank_memory(config, pp).instant).startswith(f"backward of layer {layer}, swiglu")
