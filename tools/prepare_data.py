"""Tokenize text, JSON Lines and Parquet files into a token store (Megatron's .bin and .idx)."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import blake2b

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megalite.config.errors import InputError
from megalite.data.store import StoreWriter, token_dtype
from megalite.data.tokenizer import load_tokenizer
from megalite.entry import exit_code
from megalite_tools.documents import Skipped, find_files, read_texts
from megalite_tools.encode import Encoding, encode_texts

COMMAND = "megalite-prepare-data"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: written; 2: bad input; 130: interrupted. Then nothing is left behind."""
    with _terminated_as_interrupted():
        return exit_code(COMMAND, lambda: _prepare(_parser().parse_args(argv)))


def in_validation(document: int, seed: int, fraction: float) -> bool:
    """Whether a document belongs to the validation split; depends on nothing but the arguments."""
    digest = blake2b(f"{seed}/{document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="Formats, by extension: .jsonl, .ndjson and .json hold one JSON object per line; .parquet one document"
        " per row; anything else is UTF-8 text, one document per file. All but Parquet may end in .gz, .zst or .zstd."
        " The output does not depend on --workers.",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, or a directory that --glob selects from")
    parser.add_argument("--tokenizer", required=True, help="SentencePiece .model or Hugging Face tokenizer.json")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--glob", default="**/*.txt", help="files to take from a directory (default: %(default)s)")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="field or column with the text (%(default)s)")
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="share of documents to hold out: writes PREFIX_train and PREFIX_valid instead of PREFIX",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of held-out documents")
    parser.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document token")
    parser.add_argument("--eod-token", metavar="TOKEN", help="that token, where the tokenizer's usual one is wrong")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a document that cannot be used: stop and leave nothing, or leave it out and count it",
    )
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes (%(default)s)")
    return parser


def _prepare(options: argparse.Namespace) -> None:
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid-fraction {options.valid_fraction} is not in [0, 1)")
    if options.workers < 1:
        raise InputError(f"--workers {options.workers} is not at least 1")
    tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    if tokenizer.eod is None and not options.no_eod:
        raise InputError(f"{options.tokenizer}: no end-of-document token; name it with --eod-token, or use --no-eod")
    files = find_files(options.inputs, options.glob)
    encoding = Encoding(options.tokenizer, None if options.no_eod else tokenizer.eod)
    skipped = Skipped()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(StoreWriter(f"{options.out}{suffix}", token_dtype(tokenizer.vocab_size)))
            for suffix in (("_train", "_valid") if options.valid_fraction else ("",))
        ]
        progress = stack.enter_context(_progress())
        task = progress.add_task("", total=len(files), documents=0, tokens=0, rate=0.0)
        texts = read_texts(progress.track(files, task_id=task), options.json_key, options.on_error, skipped)
        batches = stack.enter_context(closing(encode_texts(texts, encoding, options.workers)))
        documents = 0
        for batch in batches:
            for tokens in batch.documents():
                held_out = in_validation(documents, options.seed, options.valid_fraction)
                writers[held_out].add(tokens)
                documents += 1
            total = sum(writer.tokens for writer in writers)
            rate = total / (progress.tasks[task].elapsed or 1)
            progress.update(task, documents=documents, tokens=total, rate=rate)
        if not writers[0].documents:
            if not documents:
                raise InputError(skipped.nothing_kept())
            raise InputError(f"all {documents} documents fell to validation; lower --valid-fraction")
        for writer in writers:  # all that can fail happens before the first store appears
            writer.seal()
    _report(writers, skipped)


def _progress() -> Progress:
    return Progress(
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("· {task.fields[documents]:,} documents · {task.fields[tokens]:,} tokens"),
        TextColumn("· {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _report(writers: list[StoreWriter], skipped: Skipped) -> None:
    for writer in writers:
        names = " and ".join(map(str, writer.files))
        print(f"{names}: {writer.documents:,} documents, {writer.tokens:,} tokens")
        if not writer.documents:
            print("  this split is empty: raise --valid-fraction or give more documents")
    for line in skipped.lines():
        print(f"skipped {line}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM like Ctrl-C, so that temporary files are removed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
