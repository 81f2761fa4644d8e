"""An order for a planned pipeline: timed as the saved file is, within memory, never slower than a named schedule."""

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from megalite.base.errors import InputError
from megalite.commands.main import main
from megalite.commands.plan.request import Asked, as_is, ask
from megalite.commands.plan.search_order import Order, best_order
from megalite.config.load import load
from megalite.config.rules.validate import check as checked
from megalite.config.schema import Config
from megalite.layout_search.time_bounds import VIRTUAL_STAGES
from megalite.plan.pipeline import table_of
from megalite.schedule import search as searching
from megalite.schedule.check import check
from megalite.schedule.file import write
from megalite.schedule.generate import NAMES

SIZES = ["model.layers=12", "model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1536"]
LAYOUT = ["parallel.pp=4", "parallel.data.mode=zero1", "batch.global=16", "batch.micro=1"]


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "EFFORT", 20_000)


def asked(*overrides: str, **options: object) -> Asked:
    given: dict[str, object] = dict.fromkeys(("tokens", "days", "budget", "max_memory", "cluster", "routing"))
    given |= {"offload": False, "files": [], "overrides": [*SIZES, *LAYOUT, *overrides], **options}
    return ask(argparse.Namespace(**given))


def saved(order: Order, folder: Path) -> Config:
    """The layout with the order's file."""
    assert check(order.table) == []
    path = folder / "order.yaml"
    path.write_text(write(order.table))
    config = checked(order.of(str(path)), order.config.parallel.layout.world_size)
    assert table_of(config).orders == order.table.orders
    return config


@pytest.mark.parametrize("recompute", ["train.recompute=none", "train.recompute=full"])
def test_a_searched_order_is_faster_than_1f1b_and_fits(recompute: str) -> None:
    question = asked(recompute)
    config = as_is(question, 8)
    order = best_order(question, config)
    before, _ = question.predict(config)
    assert order.name == "auto"
    assert not order.is_own
    assert order.seconds < before.seconds == pytest.approx(order.own)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.data.mode=ddp"],
        ["parallel.data.mode=zero2", "parallel.dp_replicate=2"],
        ["parallel.data.mode=zero3", "parallel.pp=2"],
        ["train.compile=true"],
        ["train.recompute=budget", "train.recompute_budget=0.6"],
        *(
            ["parallel.pp=2", "model.layers=11", "train.recompute=budget", f"train.recompute_budget={budget}"]
            for budget in (0.02, 0.08)  # so that layers recompute in another way under another order
        ),
        ["parallel.pipeline.schedule=auto", "parallel.pipeline.memory=1"],
        ["parallel.pipeline.split=[4,3,3,2]"],
    ],
)
def test_the_saved_file_takes_the_time_that_was_searched_for(overrides: list[str], tmp_path: Path) -> None:
    question = asked(*overrides, cluster="l40s" if "parallel.data.mode=zero2" in overrides else None)
    order = best_order(question, as_is(question, 8))
    after, memory = question.predict(saved(order, tmp_path))
    assert after.seconds == pytest.approx(order.seconds, rel=1e-9)
    assert order.seconds <= order.own * (1 + 1e-9)
    assert memory.total == order.memory


def named(question: Asked, config: Config) -> dict[str, float]:
    """The seconds of a step under each named schedule that fits into memory."""
    found = {}
    for name in NAMES:
        for virtual in VIRTUAL_STAGES if name == "interleaved_1f1b" else (None,):
            pipeline = replace(config.parallel.pipeline, schedule=name, virtual_stages=virtual)
            other = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
            try:
                prediction, memory = question.predict(checked(other, config.parallel.layout.world_size))
            except InputError:  # more stages than layers
                continue
            if memory.total <= question.limit:
                found[f"{name} {virtual}"] = prediction.seconds
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_named_schedule_that_fits_is_faster(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    pp, m = random.choice([2, 3, 4]), random.randint(1, 10)
    question = asked(
        f"parallel.pp={pp}",
        f"parallel.dp_shard={random.choice([1, 2, 16])}",
        f"parallel.data.mode={random.choice(['ddp', 'zero1', 'zero2', 'zero3'])}",
        f"model.layers={random.randint(2 * pp, 14)}",
        f"model.width={random.choice([256, 2048])}",
        f"train.recompute={random.choice(['none', 'selective', 'full'])}",
        cluster=random.choice(["h100_sxm", "l40s"]),
    )
    config = question.config
    size = m * config.parallel.dp_shard  # type: ignore[operator]
    question = replace(question, config=replace(config, batch=replace(config.batch, global_=size)))
    config = as_is(question, pp * config.parallel.dp_shard)  # type: ignore[operator]
    _, memory = question.predict(config)
    question = replace(question, limit=round(memory.total * random.uniform(0.9, 2.0)))
    rivals = named(question, config)
    try:
        order = best_order(question, config)
    except InputError:
        assert not rivals
        return
    after, memory = question.predict(saved(order, tmp_path))
    assert memory.total <= question.limit
    assert after.seconds <= min(rivals.values(), default=float("inf")) * (1 + 1e-9)


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


@pytest.mark.parametrize(
    ("override", "rule"),
    [("parallel.pp=1", r"parallel\.pp = 1"), ("batch.rampup={start: 8, tokens: 1000000}", "rampup")],
)
def test_a_layout_without_one_order_is_refused(override: str, rule: str) -> None:
    question = asked(override)
    with pytest.raises(InputError, match=rule):
        best_order(question, as_is(question, 8))


def test_where_no_order_is_faster_the_file_has_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    order, written = tmp_path / "order.yaml", tmp_path / "run.yaml"
    layout = ["parallel.pp=2", "batch.micro=16", "parallel.tp=1"]  # one micro-batch
    given = ["configs/model/tiny.yaml", "batch.global=16", *layout]
    assert main(["plan", *given, "--gpus", "2", "--schedule", str(order), "--write", str(written)]) == 0
    assert "It is the order of 1f1b, as none that was searched is faster" in capsys.readouterr().out
    assert load([str(written)], []).parallel.pipeline.schedule == "1f1b"
    assert order.read_text().startswith('name: "1f1b"')
