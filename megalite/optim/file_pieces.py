"""States in files as checkpoints use them: bucket by bucket, of which two are in memory. Others are used as they are.

All raise Unhealthy when the drive fails, as updates do.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.optim.scratch_file import REQUEST_BYTES, THREADS, file_of, pages
from megalite.optim.streams import as_bytes
from megalite.plan.state_streams import BUCKET_BYTES, padded


def buckets(part: Tensor) -> Iterator[slice]:
    """Cut a tensor in a file into rows that make a bucket, one row at least. A tensor in memory is one bucket.

    One is still in memory when its user asks for the next, so they are half as large as those of updates.
    """
    rows = len(part) if file_of(part) is None else BUCKET_BYTES // 2 // part[0].nbytes
    for first in range(0, max(len(part), 1), max(rows, 1)):
        yield slice(first, min(first + max(rows, 1), len(part)))


def in_memory(bucket: Tensor) -> Tensor:
    """The values of a bucket: a copy if they are in a file."""
    if file_of(bucket) is None:
        return bucket
    memory, values = _memory_for(bucket)
    _read(bucket, memory)
    return values


@contextmanager
def filled(bucket: Tensor) -> Iterator[Tensor]:
    """Hand out memory to fill a bucket in: its own or, if it is in a file, memory that is written there at the end."""
    if file_of(bucket) is None:
        yield bucket
        return
    memory, values = _memory_for(bucket)
    yield values
    _write(memory, bucket)


@torch.no_grad()
def copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another of the same shape, both in files or both in memory; on a GPU without waiting."""
    if file_of(source) is None:
        target.copy_(source, non_blocking=True)
        return
    for rows in buckets(source):
        memory, _ = _memory_for(source[rows])
        _read(source[rows], memory)
        _write(memory, target[rows])


def _memory_for(bucket: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for a bucket in whole blocks, and the bucket's values in it: a tensor whose storage has its own size."""
    memory = pages(padded(bucket.nbytes))
    return memory, torch.frombuffer(memory.numpy(), dtype=bucket.dtype, count=bucket.numel()).view(bucket.shape)


def _read(bucket: Tensor, memory: Tensor) -> None:
    file = file_of(bucket)
    assert file is not None
    _by_threads(file.read, as_bytes(bucket), memory)


def _write(memory: Tensor, bucket: Tensor) -> None:
    file = file_of(bucket)
    assert file is not None
    _by_threads(file.write, memory, as_bytes(bucket))


def _by_threads(move: Callable[[Tensor, Tensor], None], source: Tensor, target: Tensor) -> None:
    """Call `move` for parts of bytes to read or write, some at a time."""
    parts = zip(source.split(REQUEST_BYTES), target.split(REQUEST_BYTES), strict=True)
    with ThreadPoolExecutor(THREADS, "states") as threads:
        for moved in [threads.submit(move, *part) for part in parts]:
            moved.result()
