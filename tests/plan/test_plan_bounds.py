"""Whatever sizes a configuration has, what runs before training answers or refuses in little work."""

from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.convert import from_plain, keys, options, to_plain
from megalite.config.load import load
from megalite.config.parallel_schema import SCHEDULES
from megalite.config.rules.validate import check, validate
from megalite.config.schema import Config
from megalite.plan import pipeline
from megalite.plan.batches import samples_after, sequence_length
from megalite.plan.memory.fit import fitted
from megalite.plan.memory.peak import memory_of_ranks
from megalite.plan.pipeline import table_of
from megalite.plan.split import split_of
from megalite.schedule.actions import Exchange
from megalite.schedule.generate import NAMES, actions_of, build

WHOLE = [key for key, hint in keys().items() if "[]" not in key and int in options(hint)]
odd = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 64, 97, 1024, 65537, 10**6, 4194304, 10**8, 2**40, 10**12, 2**63 - 1])
sizes = st.one_of(st.integers(1, 16), odd, st.sampled_from([2**power for power in range(20)]))


@pytest.fixture(autouse=True)
def short_schedules() -> Iterator[None]:
    """Tables cost what they cost; here as little as can be."""
    with patch.object(pipeline, "MAX_ACTIONS", 500):
        yield


def plan(config: Config) -> None:
    """What `show` and `train` do before ranks start."""
    split_of(config)
    samples_after(config, config.train.steps)
    sequence_length(config, 10**9)
    config = fitted(config)
    table_of(config)
    memory_of_ranks(config)


def changed(values: dict[str, object]) -> Config:
    plain = to_plain(Config())
    for key, value in values.items():
        *path, last = key.split(".")
        section = plain
        for name in path:
            section[name] = section = section[name] or {}
        section[last] = value
    config, problems = from_plain(plain)
    assert problems == []
    return config


@pytest.mark.timeout(60)
@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.sampled_from(WHOLE), sizes, max_size=5),
    st.fixed_dictionaries(
        {
            "parallel.pipeline.schedule": st.sampled_from([*SCHEDULES]),
            "train.recompute": st.sampled_from(["none", "full"]),
            "batch.memory": st.sampled_from([None, 1.0]),
        }
    ),
    st.none() | st.integers(1, 10**11),
)
def test_all_sizes_are_answered_or_refused(
    values: dict[str, int], others: dict[str, object], world_size: int | None
) -> None:
    automatic = {} if others["batch.memory"] is None else {"batch.micro": "auto"}
    with suppress(InputError):
        plan(check(changed({**values, **others, **automatic}), world_size))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["batch.global=4194304"], r"batch\.global = 4194304: must be at most 1,048,576: these are sequences, not tok"),
        (["batch.global=262144"], r"makes 262,144 micro-batches .* schedule of 524,288 actions, more than the 500"),
        (["batch.global=1000000000000"], r"batch\.global"),
        (["model.layers=100000000"], r"model\.layers = 100000000: must be at most 10,000: more than any model has"),
        (["model.sequence_length=1099511627776"], r"model\.sequence_length"),
        (["parallel.pp=100000"], r"parallel\.pp = 100000: must be at most"),
        (["parallel.pipeline.virtual_stages=1000000"], r"virtual_stages = 1000000: must be at most"),
        (["train.steps=1000000000000000000"], r"train\.steps = 1000000000000000000: must be at most"),
        (["train.steps=1000000000000", "model.sequence_length=16777216"], r"train\.steps .* more than 64 bits can cou"),
        (["batch.global=1048576", "batch.rampup={start: 1, tokens: 1}"], r"makes 1,048,576 batch sizes"),
        (["parallel.tp=4096", "parallel.cp=4096", "parallel.dp_shard=4096"], r"makes 68,719,476,736 ranks"),
        (["model.vocab_size=1"], r"model\.vocab_size = 1: must be at least 2: one token alone leaves nothing to pred"),
        (["optim.eps=10"], r"optim\.eps = 10.0: must be at most 1: it would drown"),
    ],
)
def test_sizes_that_are_absurd_are_refused_with_a_reason(overrides: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        plan(check(load([], overrides)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.layers=10000", "batch.global=200"],
        ["train.steps=1000000000", "batch.global=200", "batch.rampup={start: 1, tokens: 100000000000000}"],
        ["model.sequence_length=1073741789", "batch.curriculum={start: 1, tokens: 1000000}", "train.steps=1000"],
        ["batch.global=720720", "batch.micro=auto", "batch.memory=100"],
        ["checkpoint.interval=1000000000000", "train.spike_window=1000000"],
    ],
)
def test_what_is_large_but_can_be_is_answered(overrides: list[str]) -> None:
    plan(check(load([], overrides)))


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_the_length_of_a_schedule_is_known_before_it_is_made(name: str, p: int, v: int, m: int) -> None:
    v = v if name == "interleaved_1f1b" else SCHEDULES[name]
    m = max(m, p) if v > 1 and name == "interleaved_1f1b" else m
    programs = build(name, p, m, v).programs
    made = sum(len(item.actions) if isinstance(item, Exchange) else 1 for program in programs for item in program)
    told = actions_of(name, p, m, v)
    assert made <= told
    assert made == told or name == "dualpipev"


def test_numbers_are_bounded_by_default() -> None:
    broken = {problem.key for problem in validate(changed(dict.fromkeys(WHOLE, 2**63 - 1)))}
    assert set(WHOLE) - broken <= {"run.seed"}
