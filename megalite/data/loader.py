"""One data-parallel rank's batches, read ahead in the background."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from megalite.config.errors import InputError
from megalite.data.samples import Samples
from megalite.plan.batches import GlobalBatch

AHEAD = 2  # batches


class Loader:
    """Cuts global batches into the micro-batches of rank `dp_rank` out of `dp`.

    The samples of a step are the same, and in the same order, for every layout and every micro-batch size. Raises
    InputError where the sizes do not divide.
    """

    def __init__(self, samples: Samples, micro_batch: int, dp: int, dp_rank: int, pin_memory: bool = False) -> None:
        self.samples = samples
        self.micro_batch = micro_batch
        self.dp = dp
        self.dp_rank = dp_rank
        self._pin_memory = pin_memory

    def read(self, batch: GlobalBatch) -> Tensor:
        """The rank's share of a global batch: int64 `[m, b · pieces, s / pieces + 1]` on the CPU.

        A shorter sequence's last target is the first token of the next, so every token stays a target once.
        """
        if batch.samples % (self.dp * self.micro_batch):
            raise InputError(
                f"a global batch of {batch.samples} is not a multiple of batch.micro = {self.micro_batch}"
                f" times {self.dp} data-parallel ranks"
            )
        count = batch.samples // self.dp
        mine = batch.ids[self.dp_rank * count :][:count]
        tokens = torch.from_numpy(np.stack([self.samples[index] for index in mine]))
        length = self.samples.sequence_length // batch.pieces
        micros = tokens.unfold(1, length + 1, length).reshape(-1, self.micro_batch * batch.pieces, length + 1)
        return micros.pin_memory() if self._pin_memory else micros

    def batches(self, wanted: Iterable[GlobalBatch]) -> Iterator[tuple[GlobalBatch, Tensor]]:
        """Every wanted batch with the rank's share of it; an error surfaces at the batch it belongs to."""
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        submitted = ((batch, reader.submit(self.read, batch)) for batch in wanted)
        ahead: deque[tuple[GlobalBatch, Future[Tensor]]] = deque()
        try:
            ahead.extend(islice(submitted, AHEAD))
            while ahead:
                batch, reading = ahead.popleft()
                micros = reading.result()
                ahead.extend(islice(submitted, 1))
                yield batch, micros
        finally:
            reader.shutdown(cancel_futures=True)
