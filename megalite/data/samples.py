"""Training samples: sample i is a pure function of (sources, seed, i), whatever the layout of the run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.config.schema import Remote, Source
from megalite.data.documents import document_begins
from megalite.data.joined_store import open_store
from megalite.data.order import integer_weights, mixture, mixture_counts, order_key, permute
from megalite.data.store import TokenStore


@dataclass(frozen=True)
class SourceSamples:
    """One source, cut into samples of `sequence_length` tokens, each with the target of its last token."""

    path: str
    tokens: int
    samples: int  # in one epoch
    unused: int  # tokens at the tail that no sample reaches


@dataclass(frozen=True)
class Sample:
    """A stretch of a token stream."""

    tokens: NDArray[np.int64]  # [s + 1]; inputs and targets are shifted by one
    begins: NDArray[np.int64]  # where documents begin in the first s tokens, ascending, without 0
    trained: NDArray[np.bool_] | None = None  # [s]: whether each of the last s tokens is trained; None: all are


class Samples:
    """A weighted mixture of token stores as an endless sequence of samples.

    Every epoch of a source visits each of its samples once, in a new order. Sources are drawn in exact proportion to
    their weights, counted in tokens. Documents begin where a source's index says so. In a source whose index has only
    one document, they also begin after every `end_of_document` token. Where a source has a mask of trained tokens, all
    samples have one, those of other sources with all tokens trained. Raises InputError for a source too small for one
    sample, for weights that are no proportions and, when a sample is read, for a token outside the vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        seed: int,
        sequence_length: int,
        vocab_size: int,
        end_of_document: int | None = None,
        remote: Remote | None = None,
    ) -> None:
        self.seed = seed
        self.end_of_document = end_of_document
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._weights = integer_weights(_checked_weights(sources))
        self._stores = [open_store(source.path, remote) for source in sources]
        self._masked = any(store.mask is not None for store in self._stores)
        self.parts = tuple(self._cut(store) for store in self._stores)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, counted from 0; there is no last one."""
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of these numbers. Their tokens are asked of a remote store all at once."""
        length = self.sequence_length
        found: list[Sample | None] = [None] * len(indices)
        for store, places in self._placed(indices):
            starts = list(places.values())
            masks = (
                store.trained_from([start + 1 for start in starts], length) if self._masked else [None] * len(starts)
            )
            read = store.read_from(starts, length + 1)
            for at, start, tokens, mask in zip(places, starts, read, masks, strict=True):
                found[at] = self._sample(store, start, tokens.astype(np.int64), mask)
        return [sample for sample in found if sample is not None]

    def trained_targets(self, indices: Sequence[int]) -> int:
        """Count the targets of these samples that are trained."""
        return sum(
            int(mask.sum())
            for store, places in self._placed(indices)
            for mask in store.trained_from([start + 1 for start in places.values()], self.sequence_length)
        )

    def counts(self, count: int) -> list[int]:
        """Count how many of the first `count` samples come from each source."""
        return mixture_counts(count, self._weights)

    def epochs(self, count: int) -> list[float]:
        """Passes over each source that the first `count` samples make, fractions included."""
        counts = self.counts(count)
        return [taken / part.samples for taken, part in zip(counts, self.parts, strict=True)]

    def fingerprints(self) -> list[str]:
        """The fingerprint of each source: equal for equal tokens."""
        return [store.fingerprint() for store in self._stores]

    def _sample(
        self, store: TokenStore, start: int, tokens: NDArray[np.int64], trained: NDArray[np.bool_] | None
    ) -> Sample:
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise InputError(
                f"{store.bin.name}: token id {worst} within tokens {start} to {start + len(tokens)}"
                f" is outside model.vocab_size = {self.vocab_size}; was the store made with another tokenizer?"
            )
        if store.documents > 1:
            begins = store.begins(start, self.sequence_length)
        else:
            begins = document_begins(tokens[:-1], self.end_of_document)
        return Sample(tokens, begins, trained)

    def _placed(self, indices: Sequence[int]) -> Iterator[tuple[TokenStore, dict[int, int]]]:
        """Each store that samples come from, with the first token of each of its samples by position in `indices`."""
        places: dict[int, dict[int, int]] = {}
        for at, index in enumerate(indices):
            source, start = self._place(index)
            places.setdefault(source, {})[at] = start
        return ((self._stores[source], starts) for source, starts in places.items())

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample comes from, and of its first token there."""
        source, nth = mixture(index, self._weights)
        samples = self.parts[source].samples
        epoch, within = divmod(nth, samples)
        position = permute(within, samples, order_key(self.seed, source, epoch))
        return source, position * self.sequence_length

    def _cut(self, store: TokenStore) -> SourceSamples:
        samples = (store.tokens - 1) // self.sequence_length
        if samples < 1:
            raise InputError(
                f"{store.bin.name}: {store.tokens} tokens are too few for one sample, which needs"
                f" model.sequence_length + 1 = {self.sequence_length + 1}; prepare more text, or use shorter sequences"
            )
        return SourceSamples(store.prefix, store.tokens, samples, store.tokens - samples * self.sequence_length - 1)


def _checked_weights(sources: Sequence[Source]) -> list[float]:
    if not sources:
        raise InputError("no data: give at least one source, as in `data: {train: [{path: PREFIX}]}`")
    for source in sources:
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise InputError(f"data source {source.path}: weight {source.weight} is not a positive number")
    return [source.weight for source in sources]
