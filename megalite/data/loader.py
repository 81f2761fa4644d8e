"""One data-parallel rank's batches, read ahead in the background."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.base.errors import InputError
from megalite.data.documents import document_begins, documents_within
from megalite.data.samples import Samples
from megalite.parallel.sequence import Documents
from megalite.plan.batches import GlobalBatch

PREFETCHED_BATCHES = 2  # batches


@dataclass(frozen=True)
class Trained:
    """The targets that a step's loss is the mean over, where these are not all."""

    targets: Tensor  # bool [m, b, s], on the CPU: whether each of this rank's counts
    count: int  # how many count in the global batch, on all ranks


@dataclass(frozen=True)
class Micros:
    """One rank's micro-batches of a step, on the CPU."""

    tokens: Tensor  # int64 [m, b, s + 1]; the targets are the tokens that follow
    documents: list[list[Documents]]  # documents in the first s tokens of every sample, by micro-batch
    trained: Trained | None = None  # None: every target counts
    ids: Tensor | None = None  # int64 [m, b]: every sample's place among all that are as long; None: it is not known

    @staticmethod
    def cut_at(tokens: Tensor, end_of_document: int | None) -> "Micros":
        """Micro-batches `[m, b, s + 1]` in which the token `end_of_document` ends a document; None: no token does."""
        length, flat = tokens.shape[2] - 1, tokens.flatten(0, 1)
        if end_of_document is None:
            documents: list[Documents] = [(0, length)] * len(flat)
        else:
            begins = (document_begins(sample[:-1], end_of_document) for sample in flat.numpy())
            documents = [documents_within(each, 0, length) for each in begins]
        return Micros(tokens, _grouped(documents, tokens.shape[1]))

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens, `[m, b, s + 1]`."""
        return self.tokens.shape


class Loader:
    """Cuts global batches into the micro-batches of rank `dp_rank` out of `dp`.

    A step has the same samples in the same order under every layout and every micro-batch size. Raises InputError where
    the sizes do not divide.
    """

    def __init__(self, samples: Samples, micro_batch: int, dp: int, dp_rank: int, pin_memory: bool = False) -> None:
        self.samples = samples
        self.micro_batch = micro_batch
        self.dp = dp
        self.dp_rank = dp_rank
        self._pin_memory = pin_memory

    def read(self, batch: GlobalBatch) -> Micros:
        """The rank's share of a global batch: `[m, b · pieces, s / pieces + 1]`.

        Where a sample is cut into pieces, the last target of one is the first token of the next: every token is a
        target once.
        """
        if batch.samples % (self.dp * self.micro_batch):
            raise InputError(
                f"a global batch of {batch.samples} is not a multiple of batch.micro = {self.micro_batch}"
                f" times {self.dp} data-parallel ranks"
            )
        count = batch.samples // self.dp
        mine = self.samples.read(batch.ids[self.dp_rank * count :][:count])
        length = self.samples.sequence_length // batch.pieces
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in mine])).unfold(1, length + 1, length)
        micros = tokens.reshape(-1, self.micro_batch * batch.pieces, length + 1)
        pieces = range(0, self.samples.sequence_length, length)
        documents = [documents_within(sample.begins, start, length) for sample in mine for start in pieces]
        samples = torch.tensor(batch.ids[self.dp_rank * count :][:count])
        ids = (samples[:, None] * batch.pieces + torch.arange(batch.pieces)).view(micros.shape[:2])
        trained = self._trained(batch, [sample.trained for sample in mine], micros.shape)
        return Micros(self._pinned(micros), _grouped(documents, micros.shape[1]), trained, ids)

    def _trained(
        self, batch: GlobalBatch, mine: Sequence[NDArray[np.bool_] | None], shape: Sequence[int]
    ) -> Trained | None:
        """The trained targets of the rank's samples. Every rank counts those of all, so that none waits for another."""
        masks = [mask for mask in mine if mask is not None]
        if not masks:
            return None
        targets = torch.from_numpy(np.stack(masks)).reshape(*shape[:2], shape[2] - 1)
        return Trained(self._pinned(targets), self.samples.trained_targets(batch.ids))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin_memory else tensor

    def batches(self, wanted: Iterable[GlobalBatch]) -> Iterator[tuple[GlobalBatch, Micros]]:
        """All wanted batches, each with the rank's share of it. An error is raised at the batch that it belongs to."""
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        submitted = ((batch, reader.submit(self.read, batch)) for batch in wanted)
        ahead: deque[tuple[GlobalBatch, Future[Micros]]] = deque()
        try:
            ahead.extend(islice(submitted, PREFETCHED_BATCHES))
            while ahead:
                batch, reading = ahead.popleft()
                micros = reading.result()
                ahead.extend(islice(submitted, 1))
                yield batch, micros
        finally:
            reader.shutdown(cancel_futures=True)


def _grouped(documents: list[Documents], size: int) -> list[list[Documents]]:
    return [documents[at : at + size] for at in range(0, len(documents), size)]
