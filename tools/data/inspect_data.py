"""Show what a token store holds, check it, and describe one that megalite has not written."""

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted
from megalite.base.files import write_whole
from megalite.config.remote import scheme_of
from megalite.data.check import checked_description
from megalite.data.description import Description, TokenizerFile, description_file
from megalite.data.hashes import write_hashes
from megalite.data.joined_store import JoinedStore, open_store
from megalite.data.store import Scan, TokenStore
from megalite.data.tokenizer import Tokenizer, tokenizer_hash
from megalite.data.trial import open_tokenizer_file
from megalite_tools.terminal import Terminal, bar

COMMAND = "megalite-inspect-data"
MAX_LISTED_TOKENS = 64  # tokens of each sample document
MAX_MASKED_TOKENS = 512  # where there is a mask to look at
MAX_LISTED_SOURCES = 3
SAMPLED_DOCUMENTS = 10_000  # whose trained tokens are counted
PART = 1 << 22  # lengths read at a time


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code: BAD_INPUT also for a damaged store."""
    return exit_code(COMMAND, lambda: _inspect(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "prefix", metavar="PREFIX", help="the store is PREFIX.bin and PREFIX.idx, or the list PREFIX.shards"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="decode the samples with it; with --verify, check ids against it"
    )
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="documents to show, spread over the store")
    parser.add_argument(
        "--describe",
        action="store_true",
        help="read everything and write PREFIX.json anew, or those of all shards, with the name of --tokenizer",
    )
    parser.add_argument(
        "--hashes",
        action="store_true",
        help="write PREFIX.hashes, or those of all shards, with which training checks every block that it reads from"
        " a server",
    )
    parser.add_argument("--verify", action="store_true", help="read every length, offset, boundary and token")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    if options.samples < 0:
        raise InputError(f"--samples {options.samples}: must be at least 0")
    tokenizer = open_tokenizer_file(options.tokenizer) if options.tokenizer else None
    if (options.describe or options.hashes) and scheme_of(options.prefix) is not None:
        raise InputError(f"{options.prefix}: --describe and --hashes write on this machine; run them before the upload")
    store = open_store(options.prefix)
    facts = _facts(store)
    if options.hashes:
        with bar("hashing", sum(file.size for file in store.files)) as advanced:
            for shard in store.shards:
                write_hashes(shard.prefix, shard.files, advanced)
    if options.describe or options.verify:
        with bar("reading", store.tokens * store.dtype.itemsize) as advanced:
            limit = tokenizer.vocab_size if tokenizer else None
            scans = [shard.verify(limit, lambda n: advanced(n * store.dtype.itemsize)) for shard in store.shards]
        facts.append(("verified", f"everything read; largest token id {max(scan.largest_id for scan in scans):,}"))
        if options.describe:
            for shard, scan in zip(store.shards, scans, strict=True):
                _describe(shard, scan, options.tokenizer)
    described = checked_description(store)
    facts += _described(store, described)
    padding = None if described is None or described.packed is None else described.end_of_document
    if store.mask is not None and store.documents:
        facts.append(("trained in documents", _trained(store, padding)))
    terminal = Terminal()
    terminal.line(store.prefix)
    terminal.facts(facts)
    count = min(options.samples, store.documents)
    for nth in range(count):
        terminal.styled(_sample(store, (store.documents - 1) * nth // max(1, count - 1), tokenizer, padding))


def _facts(store: TokenStore) -> list[tuple[str, str]]:
    files = [f"{Path(file.name).name} {file.size:,} bytes" for file in store.files]
    facts = [
        *([("shards", f"{len(store.shards):,}")] if isinstance(store, JoinedStore) else []),
        ("files", ", ".join(files)),
        ("tokens", f"{store.tokens:,} of {store.dtype.name}"),
        ("documents", f"{store.documents:,}"),
        ("sequences", f"{store.sequences:,}"),
    ]
    if store.sequences:
        parts = [store.lengths[at : at + PART] for at in range(0, store.sequences, PART)]
        low, high = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
        middle = np.median(store.lengths[:: max(1, store.sequences // PART)])  # an evenly spaced sample of many
        mean = store.tokens / store.sequences
        facts.append(("sequence lengths", f"min {low:,} · median {middle:,.0f} · mean {mean:,.1f} · max {high:,}"))
    return facts


def _is_padding(store: TokenStore, index: int, padding: int | None) -> bool:
    """Return whether a document is padding, which is of one token; None: the store was not packed."""
    if padding is None:
        return False
    start, end = store.bounds(index)
    return bool((store.read(start, end - start) == padding).all()) and not store.trained(start, end - start).any()


def _trained(store: TokenStore, padding: int | None) -> str:
    """Trained tokens of documents other than padding; an evenly spaced sample stands for many."""
    numbers = np.linspace(0, store.documents - 1, min(store.documents, SAMPLED_DOCUMENTS)).astype(int).tolist()
    bounds = [store.bounds(index) for index in np.unique(numbers).tolist() if not _is_padding(store, index, padding)]
    counts = np.array([store.trained(start, end - start).sum() for start, end in bounds] or [0])
    without = f" · none in {np.mean(counts == 0):.1%}" if not counts.all() else ""
    middle = f"median {np.median(counts):,.0f} · mean {counts.mean():,.1f}"
    return f"min {counts.min():,} · {middle} · max {counts.max():,}{without}"


def _describe(store: TokenStore, scan: Scan, tokenizer: str | None) -> None:
    made_with = TokenizerFile(Path(tokenizer).name, tokenizer_hash(tokenizer)) if tokenizer else None
    before = Description.read(store.prefix)  # raises if a file that is no description would be overwritten
    end = scan.end_of_document if store.documents > 1 else None
    counts = store.documents, store.tokens, scan.largest_id
    found = Description(
        version("megalite"),
        store.fingerprint(),
        *counts,
        end,
        made_with,
        trained_tokens=scan.trained_tokens,
        packed=None if before is None else before.packed,
    )
    write_whole(description_file(store.prefix), found.render())


def _described(store: TokenStore, found: Description | None) -> Iterator[tuple[str, str]]:
    if found is None:
        files = "those of the shards" if isinstance(store, JoinedStore) else description_file(store.prefix).name
        yield "description", f"none; --describe writes {files}"
        return
    end = "not known" if found.end_of_document is None else f"token {found.end_of_document}"
    made_with = found.tokenizer
    yield "largest token id", f"{found.largest_id:,}"
    yield "documents end with", end
    if found.trained_tokens is not None:
        yield "trained tokens", f"{found.trained_tokens:,}, {found.trained_tokens / max(1, found.tokens):.1%} of all"
    if found.packed is not None:
        yield "packed", f"whole documents fill sequences of {found.packed:,} tokens"
    yield "tokenizer", f"{made_with.file}, SHA-256 {made_with.sha256[:12]}…" if made_with else "not known"
    if found.source_files:
        size = sum(source.bytes for source in found.sources)
        shown = ", ".join(repr(source.path) for source in found.sources[:MAX_LISTED_SOURCES])
        rest = ", …" if found.source_files > MAX_LISTED_SOURCES else ""
        read = f"some or all documents of {counted(found.source_files, 'file')} ({size:,} bytes in those listed)"
        yield "made from", f"{read}: {shown}{rest}"
    yield "written by", f"megalite {found.megalite}"


def _sample(
    store: TokenStore, index: int, tokenizer: Tokenizer | None, padding: int | None
) -> Iterator[tuple[str, str]]:
    """The start of a document in parts of one line: its text as a Python literal, or token ids without a tokenizer.

    Where the store has a mask, trained tokens are between « and », and green.
    """
    start, end = store.bounds(index)
    shown = min(end - start, MAX_LISTED_TOKENS if store.mask is None else MAX_MASKED_TOKENS)
    ids, trained = store.read(start, shown), store.trained(start, shown)
    yield f"document {index:,} ({counted(end - start, 'token')}): ", ""
    if _is_padding(store, index, padding):
        yield "padding", "dim"
        return
    around = "" if tokenizer is None else "'"
    yield around, ""
    cuts = [] if store.mask is None else (np.flatnonzero(np.diff(trained)) + 1).tolist()
    for first, last in pairwise([0, *cuts, shown]):
        if first and tokenizer is None:
            yield " ", ""
        text = _shown(store, index, ids[first:last].tolist(), tokenizer)
        yield (f"«{text}»", "green") if store.mask is not None and shown and trained[first] else (text, "")
    yield around + (" …" if end - start > shown else ""), ""


def _shown(store: TokenStore, index: int, ids: list[int], tokenizer: Tokenizer | None) -> str:
    try:
        if tokenizer is None:
            return " ".join(map(str, ids))
        # Some tokenizers leave special tokens out of a text.
        runs = groupby(ids, lambda token: 0 <= token < tokenizer.vocab_size and tokenizer.is_special(token))
        texts = ("".join(map(tokenizer.piece, run)) if special else tokenizer.decode([*run]) for special, run in runs)
        return repr(f'{"".join(texts)}"')[1:-2]
    except InputError as error:
        raise InputError(f"{store.bin.name}: document {index:,}: {error}; was it made with another one?") from error


if __name__ == "__main__":
    sys.exit(main())
