"""What has no effect is told, with what would give it one."""

from pathlib import Path

import pytest

from megalite.config.load import load
from megalite.config.rules.doubts import doubts
from megalite.config.rules.validate import validate
from megalite.config.schema import Config

ROOT = Path(__file__).parents[2]


def told(*overrides: str) -> list[str]:
    config = load([], overrides)
    assert validate(config) == []
    return [str(doubt) for doubt in doubts(config)]


def test_a_trial_may_end_in_the_warmup_and_is_told_so() -> None:
    assert told("schedule.warmup=20", "train.steps=10") == [
        "schedule.warmup = 20: lasts all of train.steps = 10, so the learning rate does not reach optim.lr; "
        "use fewer steps of warmup, unless this is a trial"
    ]
    assert told("schedule.warmup=9", "train.steps=10") == []


SAVING = "checkpoint.interval=10"


@pytest.mark.parametrize(
    ("idle", "line", "remedy"),
    [
        (
            ["model.base.width=64"],
            "model.base.width = 64: has no effect with model.parametrization = standard; set model.parametrization=mup",
            "model.parametrization=mup",
        ),
        (
            ["model.parametrization=mup", "model.base={width: 64, layers: 2}"],
            "model.base.layers = 2: has no effect with model.parametrization = mup; "
            "set model.parametrization=completep",
            "model.parametrization=completep",
        ),
        (
            ["train.float8_recipe=rowwise"],
            'train.float8_recipe = "rowwise": has no effect with train.precision = bf16; set train.precision=fp8',
            "train.precision=fp8",
        ),
        (
            ["eval.interval=5"],
            "eval.interval = 5: has no effect with eval.steps = 0; set eval.steps, the batches to evaluate on",
            "eval.steps=1",
        ),
        (
            ["data.valid=[{path: a}]"],
            "data.valid: is not looked at with eval.steps = 0; set eval.steps, or leave data.valid out",
            "eval.steps=1",
        ),
        (
            ["checkpoint.keep_every=5"],
            "checkpoint.keep_every = 5: has no effect with checkpoint.interval = 0, which saves at the end only; "
            "set checkpoint.interval",
            SAVING,
        ),
        (
            ["model.attention.window=64", "model.sequence_length=64"],
            "model.attention.window = 64: has no effect with model.sequence_length = 64: every query reaches all "
            "tokens before it; use a shorter window, or null",
            "model.attention.window=63",
        ),
        (
            ["model.attention.window=8", "model.attention.full_every=5", "model.layers=4"],
            "model.attention.full_every = 5: has no effect with model.layers = 4: every layer has a window; "
            "use at most that, or null",
            "model.attention.full_every=4",
        ),
        (
            ["model.attention.window=8", "model.attention.full_every=1"],
            "model.attention.window = 8: has no effect with model.attention.full_every = 1: no layer has a window; "
            "use a larger full_every, or null",
            "model.attention.full_every=2",
        ),
        (
            ["model.attention.nope_every=5", "model.layers=4"],
            "model.attention.nope_every = 5: has no effect with model.layers = 4: every layer has rotary positions; "
            "use at most that, or null",
            "model.attention.nope_every=4",
        ),
        (
            ["model.attention.nope_every=1", "model.rope_theta=500"],
            "model.rope_theta = 500.0: has no effect with model.attention.nope_every = 1: no layer has rotary "
            "positions; use a larger nope_every, or null",
            "model.attention.nope_every=2",
        ),
        (
            ["checkpoint.keep_every=5", "checkpoint.keep=0", SAVING],
            "checkpoint.keep_every = 5: has no effect with checkpoint.keep = 0, which keeps all; use one of them",
            "checkpoint.keep=1",
        ),
        (
            ["checkpoint.weights=a", "checkpoint.resume=b"],
            'checkpoint.weights = "a": has no effect with checkpoint.resume = b; '
            "a run begins with one of them; leave out the other",
            "checkpoint.resume=auto",
        ),
        (
            ["train.rollback_skip=3", SAVING],
            "train.rollback_skip = 3: has no effect where nothing is rolled back; set train.on_bad_step=rollback",
            "train.on_spike=rollback",
        ),
        (
            ["train.max_bad_steps=3"],
            "train.max_bad_steps = 3: has no effect with train.on_bad_step = stop; "
            "set train.on_bad_step=skip or rollback",
            "train.on_bad_step=skip",
        ),
        (
            ["train.spike_window=64", "train.on_spike=ignore"],
            "train.spike_window = 64: has no effect with train.on_spike = ignore; set train.on_spike=warn or rollback",
            "train.on_spike=warn",
        ),
        (
            ["train.spike_threshold=4", "train.on_spike=ignore"],
            "train.spike_threshold = 4.0: has no effect with train.on_spike = ignore; "
            "set train.on_spike=warn or rollback",
            "train.on_spike=warn",
        ),
        (
            ["schedule.floor=0", "schedule.name=constant"],
            "schedule.floor = 0.0: has no effect with schedule.name = constant; use cosine or linear",
            "schedule.name=wsd",
        ),
        (
            ["parallel.context.method=ulysses"],
            'parallel.context.method = "ulysses": has no effect with parallel.cp = 1; set parallel.cp',
            "parallel.cp=2",
        ),
        (
            ["parallel.tensor.overlap=symmetric"],
            'parallel.tensor.overlap = "symmetric": has no effect with parallel.tp = 1; set parallel.tp',
            "parallel.tp=2",
        ),
        (
            ["batch.rampup={start: 8, tokens: 1000}"],
            "batch.rampup.tokens = 1000: has no effect with batch.rampup.start = batch.global; begin with less",
            "batch.rampup.start=4",
        ),
        (
            ["batch.curriculum={start: 256, tokens: 1000}"],
            "batch.curriculum.tokens = 1000: has no effect with a start of model.sequence_length; begin with less",
            "batch.curriculum.start=64",
        ),
    ],
)
def test_what_has_no_effect_is_told_until_it_has_one(idle: list[str], line: str, remedy: str) -> None:
    assert told(*idle) == [line]
    assert told(*idle, remedy) == []


def test_what_nobody_asked_for_is_not_told() -> None:
    assert list(doubts(Config())) == []
    for file in (ROOT / "configs").rglob("*.yaml"):
        if file.parent.name in ("cluster", "experiment"):  # no configurations of a run
            continue
        assert list(doubts(load([str(file)]))) == [], file
