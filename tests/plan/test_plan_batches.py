"""Ramp-up and curriculum, whatever they are, leave every sample in its place."""

from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.model_schema import Model
from megalite.config.rules.batch import batch_rules
from megalite.config.schema import Batch, Config, Curriculum, Rampup
from megalite.plan.batches import (
    GlobalBatch,
    Ranges,
    batch_size,
    batch_sizes,
    global_batches,
    joined,
    latest_batches,
    samples_after,
    sequence_length,
)

counts = st.integers(1, 6)


@st.composite
def rampups(draw: st.DrawFn, unit: int = 1) -> tuple[Rampup, int]:
    """A ramp whose sizes are multiples of `unit`, and the batch size it leads to."""
    increment = draw(counts) * unit
    start = draw(counts) * unit
    return Rampup(start, increment, draw(st.integers(1, 3000))), start + increment * draw(st.integers(0, 6))


@st.composite
def configs(draw: st.DrawFn, micro: int = 1, dp: int = 1, parts: int = 1) -> Config:
    """A run with a ramp and a curriculum, or without."""
    first, times = parts * draw(counts), draw(st.integers(1, 24))
    rampup, full = draw(rampups(micro * dp))
    curriculum = Curriculum(first, draw(st.integers(1, 3000)))
    batch = Batch(
        micro,
        full,
        rampup=draw(st.sampled_from([rampup, None])),
        curriculum=draw(st.sampled_from([curriculum, None])),
    )
    config = Config(model=Model(sequence_length=first * times), batch=batch)
    assert list(batch_rules(batch, dp, first * times, parts)) == []
    return config


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Samples to leave out, of any steps."""
    pairs = st.tuples(st.integers(0, 120), st.integers(1, 30)).map(lambda pair: (pair[0], sum(pair)))
    return joined(tuple(draw(st.lists(pairs, max_size=5))))


def take(config: Config, steps: int, consumed: int = 0, left_out: Ranges = ()) -> list[GlobalBatch]:
    return list(islice(global_batches(config, consumed, left_out), steps))


@given(configs(), st.lists(st.integers(0, 12), max_size=6), ranges())
def test_a_run_in_pieces_takes_the_steps_of_a_whole_one(config: Config, runs: list[int], left_out: Ranges) -> None:
    consumed, taken = 0, []
    for steps in runs:
        resumed = take(config, steps, consumed, left_out)
        assert samples_after(config, steps, consumed, left_out) == (resumed[-1].end if resumed else consumed)
        taken += resumed
        consumed = samples_after(config, steps, consumed, left_out)
    assert taken == take(config, sum(runs), 0, left_out)


@given(configs(), st.integers(1, 60), ranges())
def test_every_sample_is_taken_once_in_order_but_for_those_left_out(
    config: Config, steps: int, left_out: Ranges
) -> None:
    batches = take(config, steps, 0, left_out)
    assert all(len(batch.ids) == batch.samples for batch in batches)
    samples = [sample for batch in batches for sample in batch.ids]
    passed = {sample for first, end in left_out for sample in range(first, end)}
    assert samples == [sample for sample in range(batches[-1].end) if sample not in passed]


@given(configs(), configs(), st.integers(0, 20), st.integers(0, 20), ranges())
def test_another_ramp_goes_on_where_the_first_stopped(
    one: Config, other: Config, before: int, after: int, left_out: Ranges
) -> None:
    batches = take(one, before, 0, left_out)
    batches += take(other, after, samples_after(one, before, 0, left_out), left_out)
    samples = [sample for batch in batches for sample in batch.ids]
    passed = {sample for first, end in left_out for sample in range(first, end)}
    assert samples == [sample for sample in range(samples[-1] + 1 if samples else 0) if sample not in passed]


@given(configs(), ranges(), st.integers(0, 10), st.integers(0, 10), st.integers(1, 5))
def test_leaving_out_the_latest_batches_takes_those_before_again_and_goes_on_after(
    config: Config, left_out: Ranges, saved: int, later: int, count: int
) -> None:
    consumed = samples_after(config, saved, 0, left_out)
    replayed = take(config, later + 1, consumed, left_out)
    latest = latest_batches(config, consumed, left_out, replayed[-1].end, count)
    assert latest == (replayed[-count:][0].first, replayed[-1].end)
    again = take(config, later + 1, consumed, joined((*left_out, latest)))
    kept = replayed[:-count]
    assert again[: len(kept)] == kept
    assert again[len(kept)].first >= replayed[-1].end


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8))
def test_joined_ranges_have_the_same_samples_and_gaps_between_them(pairs: list[tuple[int, int]]) -> None:
    given_ranges = tuple((first, first + length) for first, length in pairs)
    found = joined(given_ranges)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    samples = [sample for first, end in found for sample in range(first, end)]
    assert samples == sorted({sample for first, end in given_ranges for sample in range(first, end)})


def test_leaving_out_by_hand() -> None:
    config = Config(batch=Batch(1, 4))
    batches = take(config, 3, 0, ((2, 3), (4, 8), (9, 10)))
    assert [batch.ids for batch in batches] == [[0, 1, 3, 8], [10, 11, 12, 13], [14, 15, 16, 17]]
    assert [(batch.first, batch.end) for batch in batches] == [(0, 9), (10, 14), (14, 18)]


@given(st.data(), counts, counts, counts)
def test_all_sizes_fit_the_layout(data: st.DataObject, micro: int, dp: int, parts: int) -> None:
    config = data.draw(configs(micro, dp, parts))
    full = config.model.sequence_length
    assert all(size % (micro * dp) == 0 for size in batch_sizes(config))
    for batch in take(config, 40):
        assert batch.samples in batch_sizes(config)
        assert full % batch.pieces == 0
        assert full // batch.pieces % parts == 0


@given(configs())
def test_sizes_and_lengths_only_grow_and_reach_the_end(config: Config) -> None:
    batches = take(config, 60)
    assert all(one.samples <= other.samples and one.pieces >= other.pieces for one, other in pairwise(batches))
    length, rampup, curriculum = config.model.sequence_length, config.batch.rampup, config.batch.curriculum
    assert batches[0].samples == (config.batch.global_ if rampup is None else rampup.start)
    assert batches[0].pieces == (1 if curriculum is None else length // curriculum.start)
    ramps = [section.tokens for section in (rampup, curriculum) if section is not None]
    (after,) = take(config, 1, -(-max(ramps, default=0) // length))
    assert (after.samples, after.pieces) == (config.batch.global_, 1)


@given(configs(), st.integers(0, 3000))
def test_growth_never_runs_ahead_of_the_line_nor_a_step_behind(config: Config, consumed: int) -> None:
    tokens, length = consumed * config.model.sequence_length, config.model.sequence_length
    rampup, curriculum = config.batch.rampup, config.batch.curriculum
    if rampup is not None:
        share = min(1, tokens / rampup.tokens)
        line = rampup.start + share * (config.batch.global_ - rampup.start)
        assert line - (rampup.increment or 0) < batch_size(config, consumed) + 1e-9
        assert batch_size(config, consumed) <= line + 1e-9
    if curriculum is not None:
        line = curriculum.start + min(1, tokens / curriculum.tokens) * (length - curriculum.start)
        here = sequence_length(config, consumed)
        longer = [size for size in range(here + 1, length + 1) if length % size == 0 and size % curriculum.start == 0]
        assert here <= line + 1e-9
        assert not longer or longer[0] > line - 1e-9


def test_a_ramp_by_hand() -> None:
    config = Config(model=Model(sequence_length=10), batch=Batch(1, 8, rampup=Rampup(2, None, 120)))
    # 2, 4 and 6 samples a step for 40 tokens each; a step that begins within a share has its size
    assert [batch.samples for batch in take(config, 7)] == [2, 2, 4, 6, 8, 8, 8]
    assert list(batch_sizes(config)) == [2, 4, 6, 8]
    assert samples_after(config, 1_000_000) == 14 + 8 * (1_000_000 - 4)


def test_a_curriculum_by_hand() -> None:
    config = Config(model=Model(sequence_length=12), batch=Batch(1, 1, curriculum=Curriculum(2, 120)))
    # 2 tokens grow by 10 in 120: 4 are reached at 24, 6 at 48, 12 at 120; 8 and 10 do not divide 12
    assert [12 // batch.pieces for batch in take(config, 12)] == [2, 2, 4, 4, 6, 6, 6, 6, 6, 6, 12, 12]


def test_without_either_all_steps_are_alike() -> None:
    config = Config(batch=Batch(1, 8))
    assert take(config, 3, 5) == [GlobalBatch(5, 8), GlobalBatch(13, 8), GlobalBatch(21, 8)]
    assert samples_after(config, 3, 5) == 29
    assert samples_after(replace(config, batch=Batch(1, 6)), 0, 5) == 5


@pytest.mark.parametrize("tokens", [1, 80, 10**15])
def test_a_ramp_that_starts_at_its_end_is_none(tokens: int) -> None:
    config = Config(batch=Batch(1, 8, rampup=Rampup(8, None, tokens)))
    assert list(batch_sizes(config)) == [8]
    assert {batch.samples for batch in take(config, 5)} == {8}
