"""Show what a token store holds, and check it."""

import argparse
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from megalite.data.store import TokenStore, store_files
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.entry import exit_code

COMMAND = "megalite-inspect-data"
SHOWN_TOKENS = 64  # of each sample document


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: sound as far as checked; 2: damaged or unusable."""
    return exit_code(COMMAND, lambda: _inspect(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="the store is PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", help="decode the samples with it; with --verify, check ids against it")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="documents to show, spread over the store")
    parser.add_argument("--verify", action="store_true", help="read every length, offset, boundary and token")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    store = TokenStore(options.prefix)
    table = Table(title=store.prefix, show_header=False, title_justify="left")
    for name, value in _facts(store):
        table.add_row(name, value)
    if options.verify:
        scan = store.verify(tokenizer.vocab_size if tokenizer else None)
        table.add_row("verified", f"everything read; largest token id {scan.largest_id:,}")
    Console(markup=False, highlight=False).print(table)
    count = min(options.samples, store.documents)
    for index in np.linspace(0, store.documents - 1, count, dtype=int):
        _show(store, int(index), tokenizer)


def _facts(store: TokenStore) -> list[tuple[str, str]]:
    files = [f"{path.name} {path.stat().st_size:,} bytes" for path in store_files(store.prefix)]
    facts = [
        ("files", ", ".join(files)),
        ("tokens", f"{store.tokens:,} of {store.dtype.name}"),
        ("documents", f"{store.documents:,}"),
        ("sequences", f"{store.sequences:,}"),
    ]
    if store.sequences:
        low, middle, high = np.min(store.lengths), np.median(store.lengths), np.max(store.lengths)
        mean = np.mean(store.lengths)
        facts.append(("sequence lengths", f"min {low:,} · median {middle:,.0f} · mean {mean:,.1f} · max {high:,}"))
    return facts


def _show(store: TokenStore, index: int, tokenizer: Tokenizer | None) -> None:
    """Print the start of a document: escaped text, which cannot disturb a terminal, or bare ids."""
    document = store.document(index)
    ids = document[:SHOWN_TOKENS].tolist()
    shown = repr(tokenizer.decode(ids)) if tokenizer else " ".join(map(str, ids))
    rest = " …" if len(document) > SHOWN_TOKENS else ""
    print(f"document {index:,} ({len(document):,} tokens): {shown}{rest}")


if __name__ == "__main__":
    sys.exit(main())
