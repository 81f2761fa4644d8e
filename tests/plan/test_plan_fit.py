"""What is fitted to memory: the micro-batch, as large as divisibility and the pipeline allow, and the mode."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataMode, DataParallel, Parallel, Pipeline
from megalite.config.rules.validate import check, validate
from megalite.config.schema import Batch, Config, Rampup
from megalite.plan.memory import peak as memory
from megalite.plan.memory.fit import GIB, check_memory, choices, fitted, peak_bytes
from megalite.plan.memory.peak import rank_memory
from megalite.plan.resolved import Plan

ZERO1 = DataParallel("zero1")


def configured(
    full: int, pp: int = 1, dp: int = 1, memory: float | None = None, rampup: Rampup | None = None
) -> Config:
    return Config(parallel=Parallel(pp=pp, dp_shard=dp), batch=Batch("auto", full, memory, rampup))


def bytes_each(each: float, fixed: float = 0.0) -> Callable[..., int]:
    return lambda config, limit=0: round(GIB * (fixed + each * config.batch.micro_size))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(configured(12), [12, 6, 4, 3, 2, 1], id="all"),
        pytest.param(configured(24, dp=2), [12, 6, 4, 3, 2, 1], id="dp 2"),
        pytest.param(configured(12, pp=2), [6, 4, 3, 2, 1], id="pp 2"),
        pytest.param(configured(12, pp=5), [2, 1], id="pp 5"),
        pytest.param(configured(4, pp=4), [1], id="as many as stages"),
        pytest.param(configured(2, pp=4), [1], id="fewer than stages"),
        pytest.param(configured(24, rampup=Rampup(6, 9, 100)), [3, 1], id="ramp"),
        pytest.param(configured(24, dp=2, rampup=Rampup(8, None, 100)), [4, 2, 1], id="ramp, dp 2"),
    ],
)
def test_choices_divide_every_batch_and_keep_all_stages_busy(config: Config, expected: list[int]) -> None:
    assert choices(config) == expected


@pytest.mark.parametrize(("memory", "micro"), [(100, 12), (13, 12), (12.99, 6), (7, 6), (3.5, 2), (2, 1)])
def test_the_largest_that_fits_is_taken(memory: float, micro: int) -> None:
    assert fitted(configured(12, memory=memory), peak=bytes_each(1, fixed=1)).batch == Batch(micro, 12)


def test_a_device_is_asked_where_the_configuration_says_nothing() -> None:
    assert fitted(configured(12), 5 * GIB, bytes_each(1)).batch.micro == 4
    assert fitted(configured(12, memory=2), 5 * GIB, bytes_each(1)).batch.micro == 2


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 48), st.floats(1, 60))
def test_what_is_taken_is_valid_and_fits(pp: int, dp: int, per_rank: int, memory: float) -> None:
    config = configured(dp * per_rank, pp, dp, memory)
    config.model.layers = 6
    found = fitted(config, peak=bytes_each(1))
    assert validate(found) == []
    assert found.batch.micro_size <= memory
    assert found.batch.micro == 1 or per_rank // found.batch.micro_size >= pp


def test_a_number_stays_as_it_is() -> None:
    config = Config(parallel=Parallel(dp_shard=1, data=DataParallel("zero2")), batch=Batch(2, 12))
    assert fitted(config, GIB, peak=bytes_each(1)) == config


@pytest.mark.parametrize(
    ("device", "mode"), [(None, "zero3"), (5.9, "zero3"), (6, "zero2"), (7, "zero2"), (8, "zero1"), (100, "zero1")]
)
def test_the_mode_that_sends_least_is_taken_of_those_that_fit(device: float | None, mode: DataMode) -> None:
    needed = {"zero1": 8, "zero2": 6, "zero3": 4}

    def peak(config: Config, limit: float = math.inf) -> int:
        return needed[config.parallel.data.mode] * GIB

    config = Config(parallel=Parallel(dp_shard=2), batch=Batch(2, 12))
    offered = None if device is None else round(device * GIB)
    assert fitted(config, offered, peak).parallel.data.mode == mode
    asked = replace(config, batch=replace(config.batch, memory=device))
    assert fitted(asked, GIB, peak) == replace(fitted(config, offered or GIB, peak), batch=Batch(2, 12))


def test_one_rank_keeps_its_weights_where_memory_is_not_known() -> None:
    config = Config(parallel=Parallel(tp=2, dp_shard=1), batch=Batch(2, 12))
    assert config.parallel.data_mode == fitted(config, None, bytes_each(1)).parallel.data.mode == "zero1"
    assert fitted(config, 1, bytes_each(1)).parallel.data.mode == "zero3"


def test_a_mode_that_fits_is_predicted_by_memory() -> None:
    """The largest of the modes takes exactly as much as is there, then a byte more."""
    config = check(Config(model=Model(vocab_size=4096), parallel=Parallel(dp_shard=4), batch=Batch(2, 8)), 4)
    least = replace(config, parallel=replace(config.parallel, data=ZERO1))
    assert fitted(config, peak_bytes(least)).parallel.data.mode == "zero1"
    assert fitted(config, peak_bytes(least) - 1).parallel.data.mode in ("zero2", "zero3")


def test_too_little_memory_names_what_would_do() -> None:
    with pytest.raises(InputError) as caught:
        fitted(configured(12, memory=2), peak=bytes_each(1.001, fixed=2))
    assert str(caught.value.problems[0]) == (
        "batch.memory = 2: 2.00 GiB are too few: a micro-batch of 1 has a predicted peak of 3.00 GiB; "
        "use at least 3.01, train.recompute, or more ranks to share the model"
    )
    enough = fitted(configured(12, memory=3.01), peak=bytes_each(1.001, fixed=2))
    assert enough.batch.micro == 1


def test_too_small_a_device_is_not_asked_for_more() -> None:
    with pytest.raises(
        InputError,
        match=r"the 1.00 GiB of a device for tensors are too few: .* of 2.00 GiB; use train.recompute, or more ranks",
    ):
        fitted(configured(12), GIB, bytes_each(2))


def test_the_prediction_is_that_of_the_fullest_rank() -> None:
    config = check(Config(model=Model(vocab_size=4096), parallel=Parallel(pp=2, data=ZERO1), batch=Batch(2, 8)))
    ranks = [rank_memory(config, pp).total for pp in range(2)]
    assert peak_bytes(config) == max(ranks) != min(ranks)
    limit = max(ranks) / GIB
    auto = replace(config, batch=Batch("auto", 8, limit))
    assert fitted(auto).batch.micro == 2
    assert fitted(replace(auto, batch=Batch("auto", 8, limit * 0.999))).batch.micro == 1


def test_a_growing_batch_has_to_fit_at_its_fullest() -> None:
    interleaved = Pipeline("interleaved_1f1b", 4)
    model = Model(layers=8, vocab_size=4096, sequence_length=512)
    config = check(Config(model=model, parallel=Parallel(pp=2, pipeline=interleaved, data=ZERO1), batch=Batch(2, 16)))
    growing = replace(config, batch=replace(config.batch, rampup=Rampup(10, 2, 100)))
    assert peak_bytes(growing) > peak_bytes(config)
    limited = replace(growing.batch, micro="auto", memory=peak_bytes(config) / GIB)
    assert fitted(replace(growing, batch=limited)).batch.micro == 1
    assert fitted(replace(growing, batch=replace(limited, rampup=None))).batch.micro == 2


def test_what_does_not_fit_is_refused_and_what_hardly_does_is_told() -> None:
    config = check(Config(model=Model(vocab_size=4096), parallel=Parallel(pp=2, dp_shard=2), batch=Batch(2, 8)))
    fullest = peak_bytes(config)
    together = sum(sum(rank_memory(config, pp).bytes.values()) for pp in range(2))
    assert check_memory(config, 2 * fullest, "a GPU") == check_memory(config, 4 * together, "a host", ranks=4) == ""
    assert "pipeline rank" in check_memory(config, fullest, "a GPU")
    assert "all ranks together would need" in check_memory(config, 2 * together, "a host", ranks=4)
    assert "2 ranks together would need" in check_memory(config, together, "a host", ranks=2)
    with pytest.raises(InputError, match=r"would need .* of a GPU \(of the fullest rank: .*; use train\.recomp"):
        check_memory(config, fullest - 1, "a GPU")
    with pytest.raises(InputError, match=r"all ranks together would need .*host memory .*checkpoint\.async=false"):
        check_memory(config, 2 * together - 1, "a host", ranks=4)


def test_on_a_cpu_the_limit_must_be_given() -> None:
    with pytest.raises(InputError, match=r"batch\.memory = null: is needed to fit batch\.micro = auto"):
        fitted(configured(12), peak=bytes_each(1))


def test_a_micro_batch_that_does_not_fit_is_known_after_one_rank() -> None:
    """Else a search through many divisors, with many ranks, takes seconds."""
    config = configured(5040, pp=8, memory=1e-3)
    config.model.layers, config.parallel.data, seen, fullest = 8, ZERO1, [], memory._fullest

    def counted(plan: Plan, pp: int) -> memory.Memory:
        seen.append(pp)
        return fullest(plan, pp)

    with patch.object(memory, "_fullest", counted), pytest.raises(InputError, match="are too few"):
        fitted(config)
    assert len(seen) < 8 * 2
