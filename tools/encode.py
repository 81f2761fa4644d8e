"""Tokenize documents in worker processes, in order and in bounded memory."""

import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import InputError
from megalite.data.store import token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Encoding:
    """What a worker needs to know to tokenize a document."""

    tokenizer: str  # path
    eod: int | None  # id to append to every document, if any


@dataclass(frozen=True)
class Encoded:
    """Documents end to end, and how many tokens each has."""

    tokens: NDArray[np.integer]
    lengths: list[int]

    def documents(self) -> Iterator[NDArray[np.integer]]:
        return iter(np.split(self.tokens, np.cumsum(self.lengths)[:-1]))


def encode_texts(texts: Iterable[str], encoding: Encoding, workers: int) -> Generator[Encoded]:
    """Tokenized batches of `texts`, in their order whatever `workers` is; 1 runs in this process.

    Raises InputError if a worker dies.
    """
    batches = _batches(texts)
    encode = partial(encode_batch, encoding)
    if workers == 1:
        yield from map(encode, batches)
        return
    # Spawned, not forked: a tokenizer may hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker)
    try:
        ahead = deque(pool.submit(encode, batch) for batch in islice(batches, 2 * workers))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(encode, batch) for batch in islice(batches, 1))
    except BrokenProcessPool as error:
        raise InputError("a worker process died, perhaps for want of memory; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(encoding: Encoding, texts: list[str]) -> Encoded:
    """Tokenize `texts` in one go, each followed by the end-of-document id if there is one."""
    tokenizer = _tokenizer(encoding.tokenizer)
    documents = tokenizer.encode_batch(texts)
    if encoding.eod is not None:
        for document in documents:
            document.append(encoding.eod)
    lengths = [len(document) for document in documents]
    tokens = np.fromiter(chain.from_iterable(documents), token_dtype(tokenizer.vocab_size), sum(lengths))
    return Encoded(tokens, lengths)


@cache
def _tokenizer(path: str) -> Tokenizer:
    return load_tokenizer(path)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
