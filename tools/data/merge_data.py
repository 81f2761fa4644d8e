"""Make one token store of several, or a list of them that is read as one store, with the documents in their order."""

import argparse
import sys

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted, printable
from megalite.config.remote import scheme_of
from megalite.data.check import checked_description
from megalite.data.joined_store import JoinedStore
from megalite.data.shards import Shard, relative_path, shards_file, write_shards
from megalite_tools.data.documents import Skipped
from megalite_tools.data.joining import add_stores, check_unpacked, open_inputs, writer_of
from megalite_tools.data.outputs import published_together, report
from megalite_tools.data.pack import write_packed
from megalite_tools.terminal import bar

COMMAND = "megalite-merge-data"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, no files are left behind."""
    return exit_code(COMMAND, lambda: _merge(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="OUT comes first and is new: no file is overwritten. It is, byte for byte, the store that one"
        " preparation of all texts would have written. See docs/data.md.",
    )
    add_stores(parser, "the store to write: OUT.bin, OUT.idx and OUT.json")
    parser.add_argument(
        "--list", action="store_true", help="copy nothing: write the list OUT.shards, in which the stores stay"
    )
    parser.add_argument("--pack", type=int, metavar="LENGTH", help="as for megalite-prepare-data")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="with --pack, what to do with a document longer than a sequence (default: stop)",
    )
    return parser


def _merge(options: argparse.Namespace) -> None:
    store = open_inputs(options)
    if options.list:
        _list(options, store)
        return
    described = checked_description(store)
    end, length = None if described is None else described.end_of_document, options.pack
    given, skipped = {}, Skipped()
    if length is not None:
        check_unpacked(store, described)
        if length < 2 or end is None:
            rule = "needs 2 or more tokens, and documents that end with a token, which their .json tells"
            raise InputError(f"--pack {length}: {rule}")
        given = {"masked": True, "packed": length}
    writer = writer_of(options.out, store, described, **given)
    item = store.dtype.itemsize
    with published_together([writer]), bar("writing", store.tokens * item) as advanced:
        if length is None:
            writer.copy(store, 0, store.documents, lambda tokens: advanced(tokens * item))
        else:
            write_packed(store, writer, length, options.on_error, skipped, lambda tokens: advanced(tokens * item))
    report([writer])
    for line in skipped.lines():
        print(printable(f"skipped {line}"))


def _list(options: argparse.Namespace, store: JoinedStore) -> None:
    if options.pack is not None:
        raise InputError("--list and --pack cannot be used together: packing writes a store")
    for shard in store.shards:
        if scheme_of(shard.prefix) is not None:
            raise InputError(
                f"{shard.prefix}: a list names stores on its own disk or server; make it before the upload"
            )
    shards = [Shard(relative_path(each.prefix, options.out), each.documents, each.tokens) for each in store.shards]
    write_shards(options.out, shards)
    counts = (
        f"{counted(len(shards), 'store')}, {counted(store.documents, 'document')}, {counted(store.tokens, 'token')}"
    )
    print(printable(f"{shards_file(options.out)}: {counts}"))


if __name__ == "__main__":
    sys.exit(main())
