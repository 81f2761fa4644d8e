"""Leave out documents of token stores that are exact copies of earlier ones."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted, printable
from megalite.data.check import checked_description
from megalite.data.tokenizer import tokenizer_hash
from megalite.data.trial import open_tokenizer_file
from megalite_tools.data.duplicates import DuplicateFinder, Hashing, hash_documents
from megalite_tools.data.encode import add_workers_option, check_workers, in_workers
from megalite_tools.data.joining import add_stores, check_unpacked, open_inputs, runs, writer_of
from megalite_tools.data.outputs import published_together, report
from megalite_tools.terminal import bar

COMMAND = "megalite-dedup-data"
SPAN_DOCUMENTS = 1 << 12  # documents that a worker hashes at a time


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, no files are left behind."""
    return exit_code(COMMAND, lambda: _dedup(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="OUT comes first and is new: no file is overwritten. The first of equal documents stays, in its place."
        " The output does not depend on --memory or --workers. See docs/data.md.",
    )
    add_stores(parser, "the store to write: OUT.bin, OUT.idx and OUT.json")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="the tokenizer of the stores: compare texts, without case and kinds of blanks, in place of tokens",
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=1.0,
        metavar="GIB",
        help="for hashes at a time; those of more documents wait in files beside OUT (default: %(default)s)",
    )
    add_workers_option(parser)
    return parser


def _dedup(options: argparse.Namespace) -> None:
    if not options.memory > 0:
        raise InputError(f"--memory {options.memory}: must be above 0")
    check_workers(options.workers)
    tokenizer = None if options.tokenizer is None else open_tokenizer_file(options.tokenizer)
    store = open_inputs(options)
    described = checked_description(store)
    check_unpacked(store, described)
    made_with = None if described is None else described.tokenizer
    if tokenizer is not None and made_with is not None and tokenizer_hash(tokenizer.path) != made_with.sha256:
        fix = f"give the tokenizer whose SHA-256 begins with {made_with.sha256[:12]}"
        raise InputError(f"{options.tokenizer}: the stores were made with another tokenizer, {made_with.file}; {fix}")
    finder = DuplicateFinder(store.documents, options.memory * 2**30, Path(options.out).parent)
    writer, item = writer_of(options.out, store, described), store.dtype.itemsize
    spans = [(at, min(at + SPAN_DOCUMENTS, store.documents)) for at in range(0, store.documents, SPAN_DOCUMENTS)]
    hashing = Hashing(tuple(options.inputs), options.tokenizer)
    hash_span = partial(hash_documents, hashing)
    with published_together([writer]):
        with bar("hashing", store.tokens * item) as advanced:
            hashed = (
                (hash_span(span) for span in spans)
                if options.workers == 1
                else in_workers(hash_span, iter(spans), options.workers)
            )

            def keys() -> Iterator:
                for (first, last), part in zip(spans, hashed, strict=True):
                    yield part
                    advanced((store.bounds(last - 1)[1] - store.bounds(first)[0]) * item)

            with closing(hashed):
                copies = finder.find(keys())
        with bar("writing", store.tokens * item) as advanced:
            for first, last, copy in runs(copies):
                if not copy:
                    writer.copy(store, first, last, lambda tokens: advanced(tokens * item))
    report([writer])
    left, tokens = int(copies.sum()), store.tokens - writer.tokens
    share = f"{left / max(1, store.documents):.2%} of {counted(store.documents, 'document')}"
    print(printable(f"left out {counted(left, 'copy', 'copies')} of earlier ones, {share}: {counted(tokens, 'token')}"))


if __name__ == "__main__":
    sys.exit(main())
