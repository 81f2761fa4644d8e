"""Stores that a program writes: all of them appear, or none; and what it says of them."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megalite.base.errors import InputError, counted, listing, printable
from megalite.base.stop_signals import listen, restore
from megalite.config.remote import scheme_of
from megalite.data.store_writer import StoreWriter


def check_name(option: str, out: str) -> None:
    """Raises InputError unless stores can have the prefix `out`, which `option` has given."""
    if out.endswith("/"):
        raise InputError(f"{option} {out}: ends with a slash; add the name of the store, as in {out}corpus")
    if scheme_of(out) is not None:
        raise InputError(f"{option} {out}: stores are written to this machine; name a path, and upload its files then")


@contextmanager
def published_together(writers: Sequence[StoreWriter]) -> Iterator[None]:
    """Enter the writers. Their stores appear on leaving normally, all of them, whatever signals come meanwhile."""
    with ExitStack() as late, ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        yield
        for writer in writers:  # all steps that can fail come before the first store appears
            writer.seal()
        late.callback(restore, listen(signal.SIG_IGN))


def report(writers: Sequence[StoreWriter]) -> None:
    """Print the files and counts of stores."""
    for writer in writers:
        counts = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
        if writer.trained is not None:
            counts += f", of which {writer.trained:,} are trained"
        print(printable(f"{listing(writer.files, 'and')}: {counts}"))
        if not writer.documents:
            print("  this split is empty: raise the share of validation, or give more documents")
