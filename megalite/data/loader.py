"""One data-parallel rank's batches, read ahead in the background."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch

from megalite.config.errors import InputError
from megalite.data.samples import Samples

AHEAD = 2  # batches


class Loader:
    """Cuts global batches into the micro-batches of rank `dp_rank` out of `dp`.

    A batch is named by the number of samples consumed before it, which is the whole data state of a run: the
    samples of a step are the same for every layout and every micro-batch size. Raises InputError where the
    sizes do not divide.
    """

    def __init__(
        self, samples: Samples, global_batch: int, micro_batch: int, dp: int, dp_rank: int, pin_memory: bool = False
    ) -> None:
        if global_batch % (dp * micro_batch):
            raise InputError(
                f"batch.global = {global_batch} is not a multiple of batch.micro = {micro_batch}"
                f" times {dp} data-parallel ranks"
            )
        self.samples = samples
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.micro_batches = global_batch // (dp * micro_batch)
        self._offset = dp_rank * (global_batch // dp)
        self._pin_memory = pin_memory

    def batch(self, consumed: int) -> torch.Tensor:
        """The rank's share of the global batch that starts at sample `consumed`: int64 [m, b, s + 1] on the CPU."""
        first = consumed + self._offset
        count = self.micro_batches * self.micro_batch
        tokens = np.stack([self.samples[index] for index in range(first, first + count)])
        batch = torch.from_numpy(tokens).view(self.micro_batches, self.micro_batch, -1)
        return batch.pin_memory() if self._pin_memory else batch

    def batches(self, consumed: int, steps: int) -> Iterator[torch.Tensor]:
        """`steps` successive batches from sample `consumed` on; an error surfaces at the batch it belongs to."""
        starts = iter(range(consumed, consumed + steps * self.global_batch, self.global_batch))
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        try:
            ahead = deque(reader.submit(self.batch, start) for start in islice(starts, AHEAD))
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(reader.submit(self.batch, start) for start in islice(starts, 1))
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
