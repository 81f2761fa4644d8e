import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megalite.config.errors import InputError
from megalite.config.schema import Source
from megalite.data.loader import Loader
from megalite.data.samples import Samples

GLOBAL = 12


@pytest.fixture
def samples(write_store: Callable[..., str]) -> Samples:
    sources = [Source(write_store([range(200)], "a"), 2.0), Source(write_store([range(500, 600)], "b"), 1.0)]
    return Samples(sources, seed=3, sequence_length=4, vocab_size=1000)


@pytest.mark.parametrize(
    ("dp", "micro"), [(dp, micro) for dp in (1, 2, 3, 4, 6, 12) for micro in (1, 2, 3) if GLOBAL % (dp * micro) == 0]
)
def test_a_step_reads_the_same_tokens_in_every_layout(samples: Samples, dp: int, micro: int) -> None:
    consumed = 5 * GLOBAL
    ranks = [Loader(samples, GLOBAL, micro, dp, rank).batch(consumed) for rank in range(dp)]
    assert {(tuple(batch.shape), batch.dtype) for batch in ranks} == {((GLOBAL // dp // micro, micro, 5), torch.int64)}
    together = torch.cat([batch.flatten(0, 1) for batch in ranks])
    expected = np.stack([samples[index] for index in range(consumed, consumed + GLOBAL)])
    assert torch.equal(together, torch.from_numpy(expected))


def test_batches_continue_where_they_stopped(samples: Samples) -> None:
    loader = Loader(samples, GLOBAL, 2, dp=2, dp_rank=1)
    whole = list(loader.batches(0, 7))
    resumed = [*loader.batches(0, 3), *loader.batches(3 * GLOBAL, 4)]
    assert len(whole) == len(resumed) == 7
    assert all(map(torch.equal, whole, resumed))
    assert torch.equal(whole[4], loader.batch(4 * GLOBAL))


def test_another_global_batch_continues_without_gap_or_repetition(samples: Samples) -> None:
    first = Loader(samples, GLOBAL, 1, 1, 0).batches(0, 2)
    then = Loader(samples, 2 * GLOBAL, 1, 1, 0).batches(2 * GLOBAL, 1)
    read = torch.cat([batch.flatten(0, 1) for batch in (*first, *then)])
    assert torch.equal(read, torch.from_numpy(np.stack([samples[index] for index in range(4 * GLOBAL)])))


def test_no_steps_are_no_batches(samples: Samples) -> None:
    assert list(Loader(samples, GLOBAL, 1, 1, 0).batches(0, 0)) == []


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_leaving_early_stops_the_reader(samples: Samples) -> None:
    batches = Loader(samples, GLOBAL, 1, 1, 0).batches(0, 1000)
    next(batches)
    assert loader_threads()
    batches.close()
    assert not loader_threads()


def test_an_error_surfaces_at_its_batch(write_store: Callable[..., str]) -> None:
    bad = Samples([Source(write_store([[*range(160), 900]]))], seed=0, sequence_length=4, vocab_size=500)
    at = next(index for index in range(40) if _fails(bad, index))
    batches = Loader(bad, 1, 1, 1, 0).batches(0, 40)
    for _ in range(at):
        next(batches)
    with pytest.raises(InputError, match="token id 900"):
        next(batches)
    assert not loader_threads()


def _fails(samples: Samples, index: int) -> bool:
    try:
        samples[index]
    except InputError:
        return True
    return False


@pytest.mark.parametrize(("micro", "dp"), [(5, 1), (4, 2), (1, 8)])
def test_sizes_that_do_not_divide_are_an_error(samples: Samples, micro: int, dp: int) -> None:
    with pytest.raises(InputError, match=rf"batch\.global = 12 .* batch\.micro = {micro} times {dp} data-parallel"):
        Loader(samples, GLOBAL, micro, dp, 0)
