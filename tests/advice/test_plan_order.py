"""An order that is searched for a planned pipeline: faster, within memory, and what the saved file runs."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.advice.asked import Asked, as_is, ask
from megalite.advice.order import best_order
from megalite.config.errors import InputError
from megalite.plan.pipeline import table_of
from megalite.schedule.check import check
from megalite.schedule.file import write

SIZES = ["model.layers=12", "model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1536"]
LAYOUT = ["parallel.pp=4", "parallel.data.mode=zero1", "batch.global=16", "batch.micro=1"]


def asked(*overrides: str, **options: object) -> Asked:
    given: dict[str, object] = dict.fromkeys(("tokens", "days", "budget", "max_memory", "cluster"))
    given |= {"offload": False, "files": [], "overrides": [*SIZES, *LAYOUT, *overrides], **options}
    return ask(argparse.Namespace(**given))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_searched_order_is_faster_than_1f1b_and_fits(recompute: str, tmp_path: Path) -> None:
    question = asked(f"train.recompute={recompute}")
    config = as_is(question, 8)
    before, _ = question.predict(config)
    order = best_order(question, config)
    assert check(order.table) == []
    path = tmp_path / "order.yaml"
    path.write_text(write(order.table))
    pipeline = replace(
        order.config.parallel.pipeline, schedule=str(path), virtual_stages=order.table.stages // order.table.ranks
    )
    saved = replace(order.config, parallel=replace(order.config.parallel, pipeline=pipeline))
    assert table_of(saved).orders == order.table.orders
    after, memory = question.predict(saved)
    assert after.seconds < before.seconds
    assert memory.total == pytest.approx(order.memory, rel=0.01)


def test_an_order_keeps_to_the_memory_there_is() -> None:
    roomy = asked()
    config = as_is(roomy, 8)
    wide = best_order(roomy, config)
    _, memory = roomy.predict(config)
    tight = replace(roomy, limit=round(memory.total * 1.02))
    narrow = best_order(tight, config)
    assert narrow.memory <= tight.limit < wide.memory
    assert narrow.seconds >= wide.seconds
    with pytest.raises(InputError, match="no order of this pipeline fits"):
        best_order(replace(roomy, limit=memory.total // 3), config)


def test_one_rank_is_no_pipeline() -> None:
    question = asked("parallel.pp=1")
    with pytest.raises(InputError, match=r"parallel\.pp = 1"):
        best_order(question, as_is(question, 8))
