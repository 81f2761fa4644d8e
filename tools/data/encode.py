"""Tokenize documents in worker processes, in order and in bounded memory."""

import argparse
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice, pairwise
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.stop_signals import STOP_SIGNALS, held_up, listen
from megalite.data.store import token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.documents import Reject
from megalite_tools.data.pieces import pieces

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
MAX_WORKERS = 1024
_Result = TypeVar("_Result")
Batch = list[tuple[str, bool]]  # pieces of texts, each with whether it is the last of its text


@dataclass(frozen=True)
class Encoding:
    """The settings with which workers tokenize documents."""

    tokenizer: str  # path
    eod_token: str | None = None  # the end-of-document token, if the tokenizer does not name one
    ends: bool = True  # whether the end-of-document id follows every document


@dataclass(frozen=True)
class Encoded:
    """The tokens of pieces of documents, end to end; the length of each piece; whether it is its document's last."""

    tokens: NDArray[np.integer]
    lengths: list[int]
    last: list[bool]
    trained: NDArray[np.bool_] | None = None  # whether each token is, where documents tell it
    rejects: tuple[Reject, ...] = ()  # documents that cannot be used

    def pieces(self) -> Iterator[tuple[NDArray[np.integer], NDArray[np.bool_] | None, bool]]:
        """Each piece: its tokens, which of them are trained, and whether it is its document's last."""
        bounds = [0, *np.cumsum(self.lengths, dtype=np.int64).tolist()]
        for (start, end), last in zip(pairwise(bounds), self.last, strict=True):
            yield self.tokens[start:end], None if self.trained is None else self.trained[start:end], last


def encode_texts(texts: Iterable[str], encoding: Encoding, workers: int) -> Generator[Encoded]:
    """Tokenized batches of `texts`, in their order for any number of `workers`. With 1, this process does the work.

    Long texts are cut, so that memory does not grow with their length and all workers share the work. Raises InputError
    if a worker dies.
    """
    batches = _batches(texts, _tokenizer(encoding))
    if workers == 1:
        return (encode_batch(encoding, batch) for batch in batches)
    return in_workers(partial(encode_batch, encoding), batches, workers)


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of programs that share work out over processes."""
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes (default: %(default)s)"
    )


def check_workers(workers: int) -> None:
    """Raises InputError unless there may be so many worker processes."""
    if not 1 <= workers <= MAX_WORKERS:
        raise InputError(f"--workers {workers} is not from 1 to {MAX_WORKERS}")


def in_workers(work: Callable[[Any], _Result], batches: Iterator[Any], workers: int) -> Generator[_Result]:
    """Yield the result of `work` for each batch, in their order. Raises InputError if a worker dies."""
    # Spawned, not forked: a tokenizer may hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=start_worker)
    try:
        ahead = deque(submit(pool, work, batch) for batch in islice(batches, 2 * workers))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(submit(pool, work, batch) for batch in islice(batches, 1))
    except BrokenProcessPool as error:
        raise InputError("a worker process died, perhaps for want of memory; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def submit(pool: Executor, work: Callable[[Any], _Result], batch: Any) -> Future[_Result]:
    """Submit `work(batch)` to a pool of processes."""
    with held_up():  # a signal must not end a worker, which may start here, with a traceback of its imports
        return pool.submit(work, batch)


def encode_batch(encoding: Encoding, batch: Batch) -> Encoded:
    """Tokenize a batch of pieces at once. The end-of-document id follows each piece that is its document's last."""
    tokenizer = _tokenizer(encoding)
    texts, last = zip(*batch, strict=True)
    found = tokenizer.encode_batch(texts)
    if encoding.ends:
        for tokens, ends in zip(found, last, strict=True):
            if ends:
                assert tokenizer.eod is not None, "the caller has asked"
                tokens.append(tokenizer.eod)
    lengths = [len(tokens) for tokens in found]
    joined = np.fromiter(chain.from_iterable(found), token_dtype(tokenizer.vocab_size), sum(lengths))
    return Encoded(joined, lengths, list(last))


@cache
def _tokenizer(encoding: Encoding) -> Tokenizer:
    return load_tokenizer(encoding.tokenizer, encoding.eod_token)


def start_worker() -> None:
    """Make this process a worker: it ends with its parent, and leaves signals of the terminal to it."""
    Thread(target=_die_with_parent, daemon=True).start()
    listen(
        signal.SIG_IGN, set(STOP_SIGNALS) - {signal.SIGTERM}
    )  # the parent handles signals that the terminal sends to all
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the work is spread over processes already


def _die_with_parent() -> None:
    """Let this process end when its parent ends, even if the parent is killed and cannot say so."""
    parent = parent_process()
    assert parent is not None, "workers are started by another process"
    parent.join()
    os._exit(ExitCode.FAILED)


def _batches(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Batch]:
    batch: Batch = []
    characters = 0
    for text in texts:
        cut = pieces(text, tokenizer)
        held = next(cut)
        for following in chain(cut, [None]):
            batch.append((held, following is None))
            characters += len(held)
            held = following or ""
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
