"""Tokenize text, JSON Lines and Parquet files, and datasets, into a token store (Megatron's .bin and .idx)."""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.data.description import TokenizerFile
from megalite.data.store_writer import sweep
from megalite.data.tokenizer import tokenizer_hash
from megalite.data.trial import open_tokenizer_file
from megalite_tools.data.chat import ChatEncoding
from megalite_tools.data.chat_template import found_template
from megalite_tools.data.conversations import checked_chat
from megalite_tools.data.documents import DEFAULT_KEY, Skipped
from megalite_tools.data.encode import Encoding, add_workers_option, check_workers
from megalite_tools.data.held_out import in_validation
from megalite_tools.data.inputs import Input, InputFile, add_reading_options, find_inputs, reading_of
from megalite_tools.data.opened import format_of
from megalite_tools.data.outputs import check_name, report
from megalite_tools.data.preparation import UNPACKED, Preparation, nothing_kept, write_stores
from megalite_tools.data.sharded import add_sharding_options, prepare_shards

COMMAND = "megalite-prepare-data"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, no files are left behind."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(
        COMMAND, lambda: _prepare(_parser().parse_args(arguments, argparse.Namespace(arguments=arguments)))
    )


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
        help="documents are conversations in JSON Lines or a dataset: `messages`, ShareGPT's `conversations`, or"
        " `prompt` and `completion`. They become text by the tokenizer's chat template, and a mask tells which tokens"
        " are trained",
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
    add_workers_option(parser)
    add_sharding_options(parser)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid-fraction {options.valid_fraction}: must be at least 0 and below 1")
    check_workers(options.workers)
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
    inputs = find_inputs(options.inputs, options.glob, reading, options.on_error, skipped)
    forms = {each: format_of(each.path, reading.format) for each in inputs if isinstance(each, InputFile)}
    if reading.separator is not None and "text" not in forms.values():
        raise InputError("--lines and --separator are for text files, but no input is one")
    for each, form in forms.items() if options.chat else ():
        if form != "jsonl":
            raise InputError(f"{each}: --chat reads JSON Lines, and this is {form}; --format jsonl says that it is not")
    given = options.tokenizer, options.eod_token, end is not None
    encoding: Encoding | ChatEncoding = Encoding(*given)
    if options.chat:
        encoding = ChatEncoding(*given, found_template(Path(options.tokenizer), options.template))
    settings = Preparation(reading, options.on_error, encoding, made_with, tokenizer.vocab_size, end, options.pack)
    if options.engine is not None or options.shards is not None:
        prepare_shards(options, settings, inputs, skipped)
    else:
        _prepare_one(options, settings, inputs, skipped)
    for line in skipped.lines():
        print(printable(f"skipped {line}"))


def _prepare_one(options: argparse.Namespace, settings: Preparation, inputs: list[Input], skipped: Skipped) -> None:
    """Write the store, or the two of a split."""
    splits = ("_train", "_valid") if options.valid_fraction else ("",)
    for split in ("", "_train", "_valid"):
        sweep(f"{options.out}{split}{UNPACKED}")
        if split not in splits:
            sweep(f"{options.out}{split}")
    report(
        write_stores(
            settings,
            inputs,
            [f"{options.out}{split}" for split in splits],
            lambda document: in_validation(document, options.seed, options.valid_fraction),
            skipped,
            options.workers,
            partial(nothing_kept, inputs, skipped),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
