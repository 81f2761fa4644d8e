"""Split the documents of token stores into those to train on and those to validate with, in their order."""

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.data.check import checked_description
from megalite_tools.data.joining import add_stores, check_unpacked, open_inputs, writer_of
from megalite_tools.data.outputs import published_together, report
from megalite_tools.data.prepare_data import drawn_number, in_validation
from megalite_tools.terminal import bar

COMMAND = "megalite-split-data"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, no files are left behind."""
    return exit_code(COMMAND, lambda: _split(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="OUT comes first and is new: no file is overwritten. With --valid-fraction the result is, byte for byte,"
        " what megalite-prepare-data would have written with it. See docs/data.md.",
    )
    add_stores(parser, "the prefix of the stores to write, OUT_train and OUT_valid")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--valid-fraction", type=float, metavar="F", help="share of documents to hold out")
    size.add_argument("--valid-documents", type=int, metavar="N", help="number of documents to hold out")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="chooses the held-out documents (default: 0)")
    return parser


def held_out(documents: int, seed: int, fraction: float | None, count: int | None) -> NDArray[np.bool_]:
    """Mark the documents that are held out: by `fraction` each by itself, else the `count` that draw the lowest."""
    if fraction is not None:
        return np.fromiter((in_validation(each, seed, fraction) for each in range(documents)), np.bool_, documents)
    drawn = np.fromiter((drawn_number(each, seed) for each in range(documents)), np.uint64, documents)
    held = np.zeros(documents, np.bool_)
    held[np.argsort(drawn, kind="stable")[:count]] = True
    return held


def runs(kinds: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Yield stretches of equal values: each with its first place, the one after its last, and the value."""
    ends = np.concatenate([[0], np.flatnonzero(np.diff(kinds)) + 1, [len(kinds)]])
    for first, last in pairwise(map(int, ends)):
        if first < last:
            yield first, last, bool(kinds[first])


def _split(options: argparse.Namespace) -> None:
    fraction, count = options.valid_fraction, options.valid_documents
    if fraction is not None and not 0 < fraction < 1:
        raise InputError(f"--valid-fraction {fraction}: must be above 0 and below 1")
    store = open_inputs(options)
    if count is not None and not 0 < count < store.documents:
        raise InputError(f"--valid-documents {count}: must be above 0 and below the {store.documents:,} of the input")
    described = checked_description(store)
    check_unpacked(store, described)
    held = held_out(store.documents, options.seed, fraction, count)
    if held.all():
        raise InputError(f"all {store.documents} documents fell to validation; lower --valid-fraction")
    writers = [writer_of(f"{options.out}{split}", store, described) for split in ("_train", "_valid")]
    item = store.dtype.itemsize
    with published_together(writers), bar("writing", store.tokens * item) as advanced:
        for first, last, valid in runs(held):
            writers[valid].copy(store, first, last, lambda tokens: advanced(tokens * item))
    report(writers)


if __name__ == "__main__":
    sys.exit(main())
