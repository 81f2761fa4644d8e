"""The loss of a model on token stores: by store, and how it is distributed over documents."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.base.files import is_file
from megalite.checkpoint.store.host_group import HostGroup
from megalite.data.check import checked_description
from megalite.data.description import Description
from megalite.data.joined_store import open_store
from megalite.data.store import TokenStore
from megalite.data.tokenizer import Tokenizer, tokenizer_hash
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.inference.score import PASS_TOKENS, token_scores

CHUNK_TOKENS = 64 * PASS_TOKENS  # tokens whose scores are asked for at a time
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # quantiles of documents' losses that are told
WORST_DOCUMENTS = 5  # documents that are named


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on one store. Losses are in nats per token."""

    documents: int  # documents that were scored
    tokens: int  # counted tokens: the trained ones, where the store has a mask
    untrained: int  # further tokens of these documents, which the mask leaves out
    loss: float
    perplexity: float
    bits_per_byte: float | None  # loss in bits per byte of the text; None: there is no tokenizer
    document_loss: dict[str, float]  # quantiles of the mean losses of documents
    worst_documents: list[int]  # numbers in the store, that with the highest loss first

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure(
    engine: Engine, group: HostGroup, prefix: str, tokenizer: Tokenizer | None, end: int | None, limit: int | None
) -> Perplexity | None:
    """The perplexity of a store, on the rank that leads; None on others. Collective.

    A document is scored from its beginning, after the token that ends documents: as the store says, or else `end`. If
    none is known, its first token is not scored. Only the tokens that the store's mask says are trained count, as in
    training; documents without one are left out. A document longer than the model's sequence is scored in windows, each
    of which sees one token of the one before. limit: so many documents, evenly spaced. Raises InputError.
    """
    store = open_store(prefix)
    described = group.once(lambda: _described(store, tokenizer))
    if described is not None and described.end_of_document is not None:
        end = described.end_of_document
    mesh = engine.mesh
    mine = _chosen(store.documents, limit)[mesh.dp_rank :: mesh.layout.dp]
    with engine.together():
        parts = _parts(engine, store, mine, end)
        rows = [row for part in parts for row in _scored(engine, store, part, tokenizer, end)]
    speaks = mesh.coordinates["pp"] == mesh.coordinates["tp"] == 0
    told = group.gather(rows if speaks else [])
    if told is None:
        return None
    found = np.array(sorted(row for part in told for row in part), np.float64).reshape(-1, 5)
    if not len(found):
        trained = "" if store.mask is None else "trained "
        raise InputError(f"{prefix}: no document has a {trained}token whose loss could be measured")
    return _summed(found, tokenizer is not None)


def _described(store: TokenStore, tokenizer: Tokenizer | None) -> Description | None:
    """The store's description, if it has one. Raises InputError if the store was made with another tokenizer."""
    found = checked_description(store)
    made_with = None if found is None else found.tokenizer
    if made_with is not None and tokenizer is not None and made_with.sha256 not in _hashes(tokenizer.path):
        rule = f"was made with {made_with.file}, which is not {tokenizer.path}"
        raise InputError(f"{store.prefix}: {rule}; give a store made with the model's tokenizer")
    return found


def _hashes(path: Path) -> Iterator[str]:
    """Hashes of a tokenizer's file, and of the `tokenizer.model` beside it that an export's `tokenizer.json` is of."""
    yield tokenizer_hash(path)
    if is_file(model := path.with_name("tokenizer.model")):
        yield tokenizer_hash(model)


def _chosen(documents: int, limit: int | None) -> NDArray[np.int64]:
    count = documents if limit is None else min(limit, documents)
    return np.linspace(0, documents - 1, count, dtype=np.int64) if count > 1 else np.arange(count)


Document = tuple[int, list[Stem]]  # its number, and its windows


def _parts(
    engine: Engine, store: TokenStore, documents: Sequence[int] | NDArray[np.int64], end: int | None
) -> Iterator[list[Document]]:
    """Documents with a token that counts, so many that they make up CHUNK_TOKENS tokens."""
    part: list[Document] = []
    tokens = 0
    for number in map(int, documents):
        windows = _windows(_checked(store, number, engine.model.vocab_size), end, engine.model.sequence_length)
        if _counting(store, number, end).any():
            part.append((number, windows))
            tokens += sum(window.length for window in windows)
        if tokens >= CHUNK_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _windows(tokens: list[int], end: int | None, length: int) -> list[Stem]:
    whole = tokens if end is None else [end, *tokens]
    return [
        Stem(whole[start : start + 1], [whole[start + 1 : start + 1 + length]])
        for start in range(0, len(whole) - 1, length)
    ]


def _counting(store: TokenStore, number: int, end: int | None) -> NDArray[np.bool_]:
    """Return whether each scored token of a document counts: the first is not scored if none is known before it."""
    start, stop = store.bounds(number)
    return store.trained(start, stop - start)[int(end is None) :]


def _scored(
    engine: Engine, store: TokenStore, part: list[Document], tokenizer: Tokenizer | None, end: int | None
) -> Iterator[tuple[int, int, int, float, int]]:
    """The number of every document, its tokens that count and that do not, and the loss and bytes of the former."""
    scores = iter(token_scores(engine, [window for _, windows in part for window in windows]))
    for number, windows in part:
        likelihoods = np.concatenate([next(scores)[0][:, 0].numpy() for _ in windows])
        counting = _counting(store, number, end)
        count = int(counting.sum())
        size = 0
        if tokenizer is not None:
            tokens = store.document(number)
            text = tokens[len(tokens) - len(counting) :][counting].tolist()
            text = text[:-1] if text[-1] == end else text
            size = len(tokenizer.decode(text).encode(errors="replace"))
        yield number, count, len(counting) - count, -float(likelihoods[counting].sum()), size


def _checked(store: TokenStore, number: int, vocabulary: int) -> list[int]:
    tokens = store.document(number)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        rule = f"document {number} has a token id outside model.vocab_size = {vocabulary}"
        raise InputError(f"{store.bin.name}: {rule}; was the store made with another tokenizer?")
    return [int(token) for token in tokens]


def _summed(found: NDArray[np.float64], with_bytes: bool) -> Perplexity:
    numbers, tokens, untrained, losses, sizes = found.T
    loss, means = float(losses.sum() / tokens.sum()), losses / tokens
    size = sizes.sum()
    return Perplexity(
        documents=len(found),
        tokens=int(tokens.sum()),
        untrained=int(untrained.sum()),
        loss=loss,
        perplexity=math.exp(min(loss, 700)),
        bits_per_byte=float(losses.sum() / math.log(2) / size) if with_bytes and size else None,
        document_loss={f"p{share:.0%}".rstrip("%"): float(np.quantile(means, share)) for share in SHARES},
        worst_documents=[int(number) for number in numbers[np.argsort(-means, kind="stable")[:WORST_DOCUMENTS]]],
    )
