"""Tokenize text, JSON Lines and Parquet files into a token store (Megatron's .bin and .idx)."""

import argparse
import os
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.data.description import SourceFile, TokenizerFile
from megalite.data.store import TokenStore, token_dtype
from megalite.data.store_writer import StoreWriter, sweep
from megalite.data.tokenizer import tokenizer_hash
from megalite.data.trial import open_tokenizer_file
from megalite_tools.data.chat import ChatEncoding, encode_chats
from megalite_tools.data.chat_template import found_template
from megalite_tools.data.conversations import checked_chat
from megalite_tools.data.documents import (
    DEFAULT_KEY,
    Skipped,
    add_reading_options,
    find_files,
    read_texts,
    reading_of,
    refuse,
)
from megalite_tools.data.encode import Encoding, encode_texts
from megalite_tools.data.opened import format_of
from megalite_tools.data.outputs import check_name, published_together, report
from megalite_tools.data.pack import write_packed

COMMAND = "megalite-prepare-data"
MAX_WORKERS = 1024
UNPACKED = ".unpacked"  # ends the name of a store whose documents are still to be packed


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, no files are left behind."""
    return exit_code(COMMAND, lambda: _prepare(_parser().parse_args(argv)))


def in_validation(document: int, seed: int, fraction: float) -> bool:
    """Return whether a document belongs to the validation split; depends only on the arguments."""
    return drawn_number(document, seed) < fraction * 2**64


def drawn_number(document: int, seed: int) -> int:
    """The number below 2**64 that a document has drawn; the lowest are held out."""
    return int.from_bytes(blake2b(f"{seed}/{document}".encode(), digest_size=8).digest(), "little")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="Formats, by suffix: .jsonl, .ndjson and .json hold one JSON object per line; .parquet one document"
        " per row; .txt, .md, .py and the like one document per file. All but Parquet may end in .gz, .bz2, .xz, .zst"
        " or .zstd. The output does not depend on --workers. See docs/data.md.",
    )
    add_reading_options(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="documents are conversations in JSON Lines: `messages`, ShareGPT's `conversations`, or `prompt` and"
        " `completion`. They become text by the tokenizer's chat template, and a mask tells which tokens are trained",
    )
    parser.add_argument("--template", metavar="FILE", help="chat template in place of the tokenizer's own; with --chat")
    parser.add_argument(
        "--pack",
        type=int,
        metavar="LENGTH",
        help="fill sequences of LENGTH tokens, the model.sequence_length of training, with whole documents",
    )
    parser.add_argument("--lines", action="store_true", help="every line of a text file is a document")
    parser.add_argument("--separator", metavar="TEXT", help="text that stands between the documents of a text file")
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="SentencePiece .model or Hugging Face tokenizer.json"
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="share of documents to hold out: writes PREFIX_train and PREFIX_valid instead of PREFIX",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="chooses the held-out documents (default: 0)")
    parser.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document token")
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="end-of-document token to use in place of the tokenizer's own"
    )
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes (default: %(default)s)"
    )
    return parser


def _prepare(options: argparse.Namespace) -> None:
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid-fraction {options.valid_fraction}: must be at least 0 and below 1")
    if not 1 <= options.workers <= MAX_WORKERS:
        raise InputError(f"--workers {options.workers} is not from 1 to {MAX_WORKERS}")
    check_name("--out", options.out)
    if options.lines and options.separator is not None:
        raise InputError("--lines and --separator cannot be used together: --lines separates at newlines")
    if options.template is not None and not options.chat:
        raise InputError("--template is for conversations; add --chat")
    reading, skipped = reading_of(options, "\n" if options.lines else options.separator), Skipped()
    if options.chat:
        key = None if options.json_key == DEFAULT_KEY else options.json_key
        reading = replace(reading, make=partial(checked_chat, key))
    tokenizer = open_tokenizer_file(options.tokenizer, options.eod_token)
    end = None if options.no_eod else tokenizer.eod
    if end is None and not options.no_eod:
        raise InputError(f"{options.tokenizer}: no end-of-document token; name it with --eod-token, or use --no-eod")
    if options.pack is not None and (options.pack < 2 or end is None):
        raise InputError(f"--pack {options.pack}: needs 2 or more tokens, and documents that end with a token")
    made_with = TokenizerFile(tokenizer.name, tokenizer_hash(options.tokenizer))
    files = find_files(options.inputs, options.glob, reading, options.on_error, skipped)
    if reading.separator is not None and not any(format_of(file, reading.format) == "text" for file in files):
        raise InputError("--lines and --separator are for text files, but no input is one")
    for file in files if options.chat else []:
        if (form := format_of(file, reading.format)) != "jsonl":
            raise InputError(f"{file}: --chat reads JSON Lines, and this is {form}; --format jsonl says that it is not")
    sources = [SourceFile(str(file), file.stat().st_size) for file in files]
    splits = ("_train", "_valid") if options.valid_fraction else ("",)
    for leftover in {"", "_train", "_valid"}.difference(splits):
        sweep(f"{options.out}{leftover}")
    for split in ("", "_train", "_valid"):
        sweep(f"{options.out}{split}{UNPACKED}")
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        masked, length = options.chat or options.pack is not None, options.pack
        finals = [
            StoreWriter(f"{options.out}{split}", dtype, end, made_with, sources, masked, length) for split in splits
        ]
        stack.enter_context(published_together(finals))
        writers = finals
        if length is not None:
            unpacked = partial(StoreWriter, dtype=dtype, masked=options.chat, temporary=True)
            writers = [stack.enter_context(unpacked(f"{options.out}{split}{UNPACKED}")) for split in splits]
        progress = stack.enter_context(_progress())
        task = progress.add_task("·", total=sum(source.bytes for source in sources), documents=0, tokens=0)
        texts = read_texts(files, reading, options.on_error, skipped, partial(progress.advance, task))
        given = options.tokenizer, options.eod_token, end is not None
        if options.chat:
            template = found_template(Path(options.tokenizer), options.template)
            encoded = encode_chats(texts, ChatEncoding(*given, template), options.workers)
        else:
            encoded = encode_texts(texts, Encoding(*given), options.workers)
        batches = stack.enter_context(closing(encoded))
        documents = 0
        for batch in batches:
            for reject in batch.rejects:
                refuse(reject, options.on_error, skipped)
            for tokens, trained, last in batch.pieces():
                writer = writers[in_validation(documents, options.seed, options.valid_fraction)]
                writer.extend(tokens, trained)
                if last:
                    writer.end_document()
                    documents += 1
            progress.update(task, documents=documents, tokens=sum(writer.tokens for writer in writers))
        if not writers[0].documents:
            if not documents:
                raise InputError(skipped.nothing_kept(files))
            raise InputError(f"all {documents} documents fell to validation; lower --valid-fraction")
        if length is not None:
            for writer, final in zip(writers, finals, strict=True):
                writer.seal()
                store = TokenStore(writer.hidden_prefix)
                task = progress.add_task("packed", total=store.tokens * dtype.itemsize, documents=0, tokens=0)

                def packed(tokens: int, task: TaskID = task, final: StoreWriter = final) -> None:
                    advance = tokens * dtype.itemsize
                    progress.update(task, advance=advance, documents=final.documents, tokens=final.tokens)

                write_packed(store, final, length, options.on_error, skipped, packed)
    report(finals)
    for line in skipped.lines():
        print(printable(f"skipped {line}"))


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(  # in 80 columns
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description} {task.fields[documents]:,} documents · {task.fields[tokens]:,} tokens · left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
