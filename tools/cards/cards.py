"""Evidence cards: what was proven of every family of presets at small size, with the commit and the versions.

Each family is verified in a layout of four ranks, trained on one rank, resumed in that layout, and compared with
transformers. Pages go to --out, the table of all families to --table.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_writable, exists, write_whole
from megalite.commands.quickstart import python_sources
from megalite.data.store_writer import StoreWriter
from megalite_launch.base.texts import counted
from megalite_tools.cards.card import folder_name, make
from megalite_tools.cards.families import FAMILIES, STEPS
from megalite_tools.cards.pages import card_page, index_page, markdown, passed

COMMAND = "megalite_tools.cards.cards"
MIN_TOKENS = 200_000  # tokens of the store, each a byte


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. Returns the exit code: FAILED if a number is above its limit."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m {COMMAND}", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--out", default="build/cards", metavar="FOLDER", help="made anew (default: %(default)s)")
    parser.add_argument("--table", metavar="FILE", help="Markdown table to write, such as docs/cards.md")
    return parser


def _run(options: argparse.Namespace) -> int:
    out, chosen = Path(options.out), options.families or list(FAMILIES)
    if unknown := [family for family in chosen if family not in FAMILIES]:
        raise InputError(f"{unknown[0]!r:.80}: is no family; choose from {', '.join(FAMILIES)}")
    if options.table is not None:
        check_writable(Path(options.table))
    if exists(out, follow=False):
        if out.is_symlink() or not (out / "store.idx").is_file():
            raise InputError(f"--out {out}: is no folder of cards, which would be made anew; give another one")
        shutil.rmtree(out)
    _write_store(out / "store")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    cards, failed = [], []
    for family in chosen:
        began = time.monotonic()
        try:
            card = make(family, out / "store", out / folder_name(family))
        except InputError as error:
            failed.append(family)
            print(f"{family}: FAILED, and has no card. {error}", flush=True)
            continue
        write_whole(out / f"{folder_name(family)}.html", card_page(card))
        cards.append(card)
        if not passed(card):
            failed.append(family)
        verdict = "FAILED" if family in failed else "passed"
        print(f"{family}: {verdict} in {time.monotonic() - began:.0f} s, loss {card.losses[STEPS]:.4f}", flush=True)
    if cards:
        write_whole(out / "index.html", index_page(cards))
        print(out / "index.html")
    if options.table is not None and len(cards) == len(chosen):
        write_whole(Path(options.table), markdown(cards))
        print(options.table)
    elif options.table is not None:
        print(f"{options.table}: is left as it was, since not every family has a card")
    if failed:
        print(f"{len(failed)} of {counted(len(chosen), 'family', 'families')} failed: {', '.join(failed)}")
    return ExitCode.FAILED if failed else ExitCode.DONE


def _write_store(prefix: Path) -> None:
    """Make a token store of Python's own sources, whose tokens are their bytes."""
    tokens = 0
    with StoreWriter(prefix, np.uint16) as writer:
        for path in python_sources():
            content = Path(path).read_bytes()
            writer.add(np.frombuffer(content, np.uint8))
            tokens += len(content)
            if tokens >= MIN_TOKENS:
                return


if __name__ == "__main__":
    sys.exit(main())
