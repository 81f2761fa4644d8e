import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from megalite.base.errors import InputError
from megalite.config.schema import Source
from megalite.data.samples import Samples

LENGTH = 4
WriteStore = Callable[..., str]


def counting(tokens: int) -> list[range]:
    """Documents of uneven lengths that hold 0, 1, 2, … `tokens` − 1."""
    return [range(start, min(start + 7, tokens)) for start in range(0, tokens, 7)]


def samples_of(*sources: Source, seed: int = 0, vocab_size: int = 10_000) -> Samples:
    return Samples(sources, seed, LENGTH, vocab_size)


def test_every_epoch_visits_every_sample_once_in_a_fresh_order(write_store: WriteStore) -> None:
    samples = samples_of(Source(write_store(counting(203))))
    (part,) = samples.parts
    assert (part.tokens, part.samples, part.unused) == (203, 50, 2)
    orders = []
    for epoch in range(3):
        starts = []
        for index in range(epoch * 50, (epoch + 1) * 50):
            sample = samples[index].tokens
            assert sample.dtype == np.int64
            assert sample.tolist() == list(range(sample[0], sample[0] + LENGTH + 1))
            starts.append(int(sample[0]))
        assert sorted(starts) == list(range(0, 200, LENGTH))
        orders.append(tuple(starts))
    assert len(set(orders)) == 3
    assert samples.epochs(125) == [2.5]


def test_one_token_less_is_one_sample_less(write_store: WriteStore) -> None:
    sizes = [samples_of(Source(write_store(counting(n), f"n{n}"))).parts[0] for n in (8, 9, 10)]
    assert [(part.samples, part.unused) for part in sizes] == [(1, 3), (2, 0), (2, 1)]


def test_a_sample_depends_on_seed_and_index_alone(write_store: WriteStore) -> None:
    source = Source(write_store(counting(400)))
    first, again, other = samples_of(source), samples_of(source), samples_of(source, seed=1)
    order = [7, 3, 250, 3, 0]
    assert all(np.array_equal(first[index].tokens, again[index].tokens) for index in order)
    assert [first[index].tokens[0] for index in range(20)] != [other[index].tokens[0] for index in range(20)]


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.1, 0.2), (5.0, 0.5)])
def test_sources_are_mixed_in_exact_proportion(write_store: WriteStore, weights: tuple[float, float]) -> None:
    paths = write_store(counting(41), "small"), write_store([range(1000, 1081)], "large")
    samples = samples_of(*map(Source, paths, weights))
    total = round(sum(weights) * 10)
    drawn = Counter(int(samples[index].tokens[0]) >= 1000 for index in range(10 * total))
    assert [drawn[False], drawn[True]] == [round(100 * weight) for weight in weights]
    assert samples.epochs(10 * total) == [drawn[False] / 10, drawn[True] / 20]


def test_the_order_within_a_source_does_not_depend_on_its_weight(write_store: WriteStore) -> None:
    paths = write_store(counting(400), "a"), write_store([range(1000, 1400)], "b")
    orders = []
    for weight in (1.0, 4.0):
        samples = samples_of(Source(paths[0], 1.0), Source(paths[1], weight))
        starts = [int(samples[index].tokens[0]) for index in range(200)]
        orders.append([start for start in starts if start >= 1000][:40])
    assert orders[0] == orders[1]


def test_a_store_too_small_for_one_sample_is_an_error(write_store: WriteStore) -> None:
    prefix = write_store(counting(LENGTH))
    with pytest.raises(InputError, match=r"store\.bin: 4 tokens are too few .* model\.sequence_length \+ 1 = 5"):
        samples_of(Source(prefix))
    with pytest.raises(InputError, match="0 tokens are too few"):
        samples_of(Source(write_store([], "empty")))


@pytest.mark.parametrize(("token", "vocab_size"), [(300, 300), (-1, 300)])
def test_a_token_outside_the_vocabulary_is_an_error(write_store: WriteStore, token: int, vocab_size: int) -> None:
    prefix = write_store([[1, 2, 3, 4, 5]])
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(token.to_bytes(4, "little", signed=True))
    samples = samples_of(Source(prefix), vocab_size=vocab_size)
    with pytest.raises(InputError, match=rf"store\.bin: token id {token} .* model\.vocab_size = {vocab_size}"):
        samples[0]


def test_the_largest_token_of_a_vocabulary_is_fine(write_store: WriteStore) -> None:
    samples = samples_of(Source(write_store([[1, 2, 3, 4, 299]])), vocab_size=300)
    assert samples[0].tokens.tolist() == [1, 2, 3, 4, 299]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_positive(write_store: WriteStore, weight: float) -> None:
    prefix = write_store(counting(20))
    with pytest.raises(InputError, match=r"weight .* is not a positive number"):
        samples_of(Source(prefix), Source(prefix, weight))


def test_no_source_is_an_error() -> None:
    with pytest.raises(InputError, match="no data"):
        samples_of()


def test_documents_begin_where_the_index_says_and_tokens_do_not(write_store: WriteStore) -> None:
    documents = [[1, 2], [3], [4, 9, 5, 9, 6, 8], [7, 8, 1, 1, 1, 1, 1]]
    prefix = write_store(documents)
    samples = Samples([Source(prefix)], 0, LENGTH, 10, end_of_document=9)
    stream = [token for document in documents for token in document]
    starts = {0, 2, 3, 9}
    for index in range(samples.parts[0].samples):
        sample = samples[index]
        at = next(at for at in range(0, 16, LENGTH) if stream[at : at + LENGTH + 1] == sample.tokens.tolist())
        assert sample.begins.tolist() == [start - at for start in sorted(starts) if at < start < at + LENGTH]


def test_without_an_index_of_documents_they_begin_after_the_end_token(write_store: WriteStore) -> None:
    prefix = write_store([[1, 9, 2, 9, 9, 3, 3, 3, 9]])
    begins = {
        tuple(sample.tokens.tolist()): sample.begins.tolist()
        for sample in map(Samples([Source(prefix)], 0, LENGTH, 10, end_of_document=9).__getitem__, range(2))
    }
    assert begins == {(1, 9, 2, 9, 9): [2], (9, 3, 3, 3, 9): [1]}
    assert not len(Samples([Source(prefix)], 0, LENGTH, 10)[0].begins)
