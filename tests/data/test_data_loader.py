import threading
from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.schema import Batch, Config, Curriculum, Rampup, Source
from megalite.data.loader import Loader
from megalite.data.samples import Sample, Samples
from megalite.plan.batches import GlobalBatch, global_batches

GLOBAL = 12


@pytest.fixture
def samples(write_store: Callable[..., str]) -> Samples:
    sources = [Source(write_store([range(200)], "a"), 2.0), Source(write_store([range(500, 600)], "b"), 1.0)]
    return Samples(sources, seed=3, sequence_length=4, vocab_size=1000)


def batches(consumed: int, steps: int, size: int = GLOBAL) -> list[GlobalBatch]:
    return [GlobalBatch(consumed + size * step, size) for step in range(steps)]


@pytest.mark.parametrize(
    ("dp", "micro"), [(dp, micro) for dp in (1, 2, 3, 4, 6, 12) for micro in (1, 2, 3) if GLOBAL % (dp * micro) == 0]
)
def test_a_step_reads_the_same_tokens_in_every_layout(samples: Samples, dp: int, micro: int) -> None:
    batch = GlobalBatch(5 * GLOBAL, GLOBAL)
    ranks = [Loader(samples, micro, dp, rank).read(batch) for rank in range(dp)]
    assert {(tuple(read.shape), read.tokens.dtype) for read in ranks} == {
        ((GLOBAL // dp // micro, micro, 5), torch.int64)
    }
    together = torch.cat([read.tokens.flatten(0, 1) for read in ranks])
    expected = np.stack([samples[index].tokens for index in range(batch.first, batch.end)])
    assert torch.equal(together, torch.from_numpy(expected))


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 3), (4, 1)])
def test_shorter_sequences_hold_the_same_tokens_and_targets(samples: Samples, dp: int, micro: int, pieces: int) -> None:
    batch = GlobalBatch(7, GLOBAL, pieces)
    ranks = [Loader(samples, micro, dp, rank).read(batch) for rank in range(dp)]
    shape = (GLOBAL // dp // micro, micro * pieces, 4 // pieces + 1)
    assert {tuple(read.shape) for read in ranks} == {shape}
    together = torch.cat([read.tokens.flatten(0, 1) for read in ranks])
    whole = torch.from_numpy(np.stack([samples[index].tokens for index in range(batch.first, batch.end)]))
    assert torch.equal(together[:, :-1].flatten(), whole[:, :-1].flatten())
    assert torch.equal(together[:, 1:].flatten(), whole[:, 1:].flatten())


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 3), (4, 1)])
def test_documents_come_with_the_tokens_they_are_of(
    write_store: Callable[..., str], dp: int, micro: int, pieces: int
) -> None:
    """Every document holds one number of its own, so that the tokens tell where it begins."""
    prefix = write_store([[number] * length for number, length in enumerate([1, 2, 5, 3, 9, 1, 1, 4, 6, 30] * 4)])
    samples = Samples([Source(prefix)], 0, 8, 40)
    for rank in range(dp):
        read = Loader(samples, micro, dp, rank).read(GlobalBatch(2, GLOBAL, pieces))
        assert len(read.documents) == read.shape[0]
        for tokens, documents in zip(read.tokens[..., :-1].flatten(0, 1), chain(*read.documents), strict=True):
            changes = (tokens[1:] != tokens[:-1]).nonzero().flatten() + 1
            assert documents == (0, *changes.tolist(), 8 // pieces)


def test_left_out_samples_are_not_read(samples: Samples) -> None:
    batch = GlobalBatch(3, GLOBAL, left_out=((5, 9), (13, 14)))
    ranks = [Loader(samples, 2, dp=3, dp_rank=rank).read(batch) for rank in range(3)]
    expected = np.stack([samples[index].tokens for index in (3, 4, 9, 10, 11, 12, *range(14, 20))])
    assert torch.equal(torch.cat([read.tokens.flatten(0, 1) for read in ranks]), torch.from_numpy(expected))


def test_batches_come_as_wanted_and_beside_what_was_read(samples: Samples) -> None:
    loader = Loader(samples, 2, dp=2, dp_rank=1)
    wanted = [GlobalBatch(0, 4), GlobalBatch(4, 8, 2), GlobalBatch(12, 12, 4), GlobalBatch(24, 12)]
    found = list(loader.batches(iter(wanted)))
    assert [batch for batch, _ in found] == wanted
    assert all(torch.equal(read.tokens, loader.read(batch).tokens) for batch, read in found)


class Counting:
    """Samples whose tokens, one after another, count from 0."""

    sequence_length = 4

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.arange(4 * index, 4 * index + 5), np.empty(0, np.int64))

    def read(self, indices: Sequence[int]) -> list[Sample]:
        return [self[index] for index in indices]


LAYOUTS = [(dp, micro) for dp in (1, 2, 3, 6) for micro in (1, 2, 3) if 6 % (dp * micro) == 0]
GROWING = Config(
    model=Model(sequence_length=4), batch=Batch(1, 18, rampup=Rampup(6, None, 150), curriculum=Curriculum(1, 200))
)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(LAYOUTS)), max_size=6))
def test_kills_and_other_layouts_repeat_and_drop_nothing_while_batches_grow(
    legs: list[tuple[int, tuple[int, int]]],
) -> None:
    consumed, tokens, targets = 0, [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for steps, (dp, micro) in legs:
        for batch in islice(global_batches(GROWING, consumed), steps):
            for rank in range(dp):
                read = Loader(Counting(), micro, dp, rank).read(batch)
                tokens.append(read.tokens[..., :-1].flatten())
                targets.append(read.tokens[..., 1:].flatten())
            consumed = batch.end
    assert torch.equal(torch.cat(tokens), torch.arange(4 * consumed))
    assert torch.equal(torch.cat(targets), torch.arange(4 * consumed) + 1)


def test_only_a_few_batches_are_read_ahead(samples: Samples) -> None:
    asked = []
    found = Loader(samples, 1, 1, 0).batches(asked.append(batch) or batch for batch in batches(0, 100))
    next(found)
    found.close()
    assert 1 < len(asked) <= 4


def test_no_steps_are_no_batches(samples: Samples) -> None:
    assert list(Loader(samples, 1, 1, 0).batches([])) == []


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_leaving_early_stops_the_reader(samples: Samples) -> None:
    reading = Loader(samples, 1, 1, 0).batches(batches(0, 1000))
    next(reading)
    assert loader_threads()
    reading.close()
    assert not loader_threads()


def test_an_error_surfaces_at_its_batch(write_store: Callable[..., str]) -> None:
    bad = Samples([Source(write_store([[*range(160), 900]]))], seed=0, sequence_length=4, vocab_size=500)
    at = next(index for index in range(40) if _fails(bad, index))
    reading = Loader(bad, 1, 1, 0).batches(batches(0, 40, size=1))
    for _ in range(at):
        next(reading)
    with pytest.raises(InputError, match="token id 900"):
        next(reading)
    assert not loader_threads()


def _fails(samples: Samples, index: int) -> bool:
    try:
        samples[index]
    except InputError:
        return True
    return False


@pytest.mark.parametrize(("micro", "dp"), [(5, 1), (4, 2), (1, 8)])
def test_sizes_that_do_not_divide_are_an_error(samples: Samples, micro: int, dp: int) -> None:
    with pytest.raises(InputError, match=rf"batch of 12 .* batch\.micro = {micro} times {dp} data-parallel"):
        Loader(samples, micro, dp, 0).read(GlobalBatch(0, GLOBAL))
