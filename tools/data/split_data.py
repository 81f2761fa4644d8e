"""Split the documents of token stores into those to train on and those to validate with, in their order."""

import argparse
import sys

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.data.check import checked_description
from megalite_tools.data.held_out import held_out
from megalite_tools.data.joining import add_stores, check_unpacked, open_inputs, runs, writer_of
from megalite_tools.data.outputs import published_together, report
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
