"""The work of megalite-prepare-data: documents of files become the tokens of stores."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from megalite.base.errors import InputError
from megalite.data.description import TokenizerFile
from megalite.data.store import TokenStore, token_dtype
from megalite.data.store_writer import StoreWriter, sweep
from megalite_tools.data.chat import ChatEncoding, encode_chats
from megalite_tools.data.documents import Reading, Skipped, refuse
from megalite_tools.data.encode import Encoding, encode_texts
from megalite_tools.data.inputs import Input, read_texts
from megalite_tools.data.outputs import published_together
from megalite_tools.data.pack import write_packed

UNPACKED = ".unpacked"  # ends the name of a store whose documents are still to be packed


@dataclass(frozen=True)
class Preparation:
    """The settings that say which tokens documents become."""

    reading: Reading
    on_error: Literal["stop", "skip"]
    encoding: Encoding | ChatEncoding
    tokenizer: TokenizerFile
    vocabulary: int  # tokens of the tokenizer
    end: int | None  # the id that ends every document
    pack: int | None  # tokens of a sequence


def write_stores(
    settings: Preparation,
    inputs: Sequence[Input],
    prefixes: Sequence[str],
    choose: Callable[[int], int],
    skipped: Skipped,
    workers: int,
    check: Callable[[int, StoreWriter], None],
    shard: bool = False,
) -> list[StoreWriter]:
    """Write the documents of `inputs`, in order, to the stores `prefixes`: all of them appear, or none.

    choose: the index of the store for a document, given its number. check: called with the number of documents and the
    first writer once all are read; it may raise. shard: show no progress, and take the place of stores that are there.
    Raises InputError.
    """
    sources = list(dict.fromkeys(each.source for each in inputs))  # a dataset may come in parts
    for prefix in prefixes:
        sweep(f"{prefix}{UNPACKED}")
    with ExitStack() as stack:
        dtype, length = token_dtype(settings.vocabulary), settings.pack
        chat = isinstance(settings.encoding, ChatEncoding)
        finals = [
            StoreWriter(
                prefix,
                dtype,
                settings.end,
                settings.tokenizer,
                sources,
                masked=chat or length is not None,
                packed=length,
                replace=shard,
            )
            for prefix in prefixes
        ]
        stack.enter_context(published_together(finals))
        writers = finals
        if length is not None:
            unpacked = partial(StoreWriter, dtype=dtype, masked=chat, temporary=True)
            writers = [stack.enter_context(unpacked(f"{prefix}{UNPACKED}")) for prefix in prefixes]
        progress = stack.enter_context(_progress(shown=not shard))
        task = progress.add_task("·", total=sum(source.bytes for source in sources), documents=0, tokens=0)
        texts = read_texts(inputs, settings.reading, settings.on_error, skipped, partial(progress.advance, task))
        if isinstance(settings.encoding, ChatEncoding):
            encoded = encode_chats(texts, settings.encoding, workers)
        else:
            encoded = encode_texts(texts, settings.encoding, workers)
        documents = 0
        for batch in stack.enter_context(closing(encoded)):
            for reject in batch.rejects:
                refuse(reject, settings.on_error, skipped)
            for tokens, trained, last in batch.pieces():
                writer = writers[choose(documents)]
                writer.extend(tokens, trained)
                if last:
                    writer.end_document()
                    documents += 1
            progress.update(task, documents=documents, tokens=sum(writer.tokens for writer in writers))
        check(documents, writers[0])
        if length is not None:
            for writer, final in zip(writers, finals, strict=True):
                writer.seal()
                store = TokenStore(writer.hidden_prefix)
                task = progress.add_task("packed", total=store.tokens * dtype.itemsize, documents=0, tokens=0)

                def packed(tokens: int, task: TaskID = task, final: StoreWriter = final) -> None:
                    advance = tokens * dtype.itemsize
                    progress.update(task, advance=advance, documents=final.documents, tokens=final.tokens)

                write_packed(store, final, length, settings.on_error, skipped, packed)
    return finals


def nothing_kept(inputs: Sequence[Input], skipped: Skipped, documents: int, first: StoreWriter) -> None:
    """Raises InputError unless the first store has a document: a check for `write_stores`."""
    if not first.documents:
        if not documents:
            raise InputError(skipped.nothing_kept(inputs))
        raise InputError(f"all {documents} documents fell to validation; lower --valid-fraction")


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(  # in 80 columns
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description} {task.fields[documents]:,} documents · {task.fields[tokens]:,} tokens · left"),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    )
