"""Train a SentencePiece tokenizer that gives back text, code included, exactly as it was."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import sentencepiece
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted, printable
from megalite.base.files import exists
from megalite.base.stop_signals import STOP_SIGNALS, Handler, listen, restore
from megalite.data.exclusive_file import claim
from megalite.data.sentence_piece import with_short_scores
from megalite_tools.data.documents import Skipped
from megalite_tools.data.inputs import add_reading_options, find_inputs, read_texts, reading_of

COMMAND = "megalite-train-tokenizer"
LINE_CHARACTERS = 2000  # longer lines are cut, since SentencePiece drops what exceeds LINE_BYTES
LINE_BYTES = 4 * LINE_CHARACTERS
MIN_LINES, MAX_LINES = 101, 2**31 - 1  # the sample sizes that SentencePiece accepts
MIN_PIECES, MAX_PIECES = 260, 1 << 27  # every byte, <unk>, <s>, </s>, and one learnt piece
THREADS = 16  # fixed: the order of summation, and so the model, may depend on it


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code. Unless that is DONE, nothing is written."""
    return exit_code(COMMAND, lambda: _train(_parser().parse_args(argv)))


def train_model(texts: Iterable[str], vocab_size: int, kind: str, lines: int) -> bytes:
    """A serialised SentencePiece model, learnt from a sample of `lines` lines; the same for the same arguments.

    Every byte has a piece, and so has a newline. Every digit is a piece of its own. Runs of spaces and tabs may be
    pieces. Text is not normalised. One character does not survive a round trip: U+2581, SentencePiece's sign for a
    space. Raises InputError if the vocabulary does not suit the text, and all errors of reading `texts`.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    sentencepiece.set_random_generator_seed(0)  # for the random sample of lines
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, failures),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            input_sentence_size=lines,
            shuffle_input_sentence=True,
            max_sentence_length=LINE_BYTES,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=THREADS,
            minloglevel=2,
        )
    except (RuntimeError, SystemError) as error:  # SystemError: version 0.2.0, if reading lines has failed
        if failures:
            raise failures[0] from None
        reason = str(error).rpartition("] ")[2].partition(" Increase vocab_size")[0]
        fix = "; use a larger one" if "smaller than" in reason else ""
        raise InputError(f"--vocab-size {vocab_size}: {reason or error}{fix}") from error
    return with_short_scores(model.getvalue()) if kind == "unigram" else model.getvalue()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        epilog="Inputs are read as by megalite-prepare-data: text, JSON Lines or Parquet files, by suffix.",
    )
    add_reading_options(parser)
    parser.add_argument("--out", required=True, metavar="FILE.model", help="the tokenizer to write")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="tokens; 259 of them are bytes and special tokens"
    )
    parser.add_argument("--type", choices=("bpe", "unigram"), default="bpe", help="algorithm (default: %(default)s)")
    parser.add_argument(
        "--lines",
        type=int,
        default=2_000_000,
        metavar="N",
        help="learn from a random sample of N lines (default: %(default)s)",
    )
    return parser


def _train(options: argparse.Namespace) -> None:
    out = Path(options.out)
    if out.suffix != ".model":
        raise InputError(f"--out {out}: the name of a SentencePiece tokenizer must end in .model")
    _check_absent(out)
    if not MIN_LINES <= options.lines <= MAX_LINES:
        raise InputError(f"--lines {options.lines} is not from {MIN_LINES} to {MAX_LINES:,}")
    if not MIN_PIECES <= options.vocab_size <= MAX_PIECES:
        raise InputError(f"--vocab-size {options.vocab_size} is not from {MIN_PIECES} to {MAX_PIECES:,}")
    reading, skipped = reading_of(options), Skipped()
    inputs = find_inputs(options.inputs, options.glob, reading, options.on_error, skipped)
    with _claimed(out) as write, _progress() as progress:
        task = progress.add_task("reading", total=sum(each.bytes for each in inputs))
        texts = read_texts(inputs, reading, options.on_error, skipped, partial(progress.advance, task))
        first = next(texts, None)
        if first is None:
            raise InputError(skipped.nothing_kept(inputs))

        def learn() -> None:
            progress.reset(task, total=None, description="learning")
            # SentencePiece lets no handler run, so the system must end this process. The next run takes over the file.
            previous.update(listen(signal.SIG_DFL, set(STOP_SIGNALS) - {signal.SIGINT}))

        previous: dict[int, Handler] = {}
        model = train_model(_then(chain([first], texts), learn), options.vocab_size, options.type, options.lines)
        restore(previous)
        write(model)
    print(f"{out}: {options.type}, {options.vocab_size:,} pieces, from {counted(len(inputs), 'input')}")
    for line in skipped.lines():
        print(printable(f"skipped {line}"))


def _lines(texts: Iterable[str], failures: list[BaseException]) -> Iterator[str]:
    """Lines to learn from. An exception that ends them early is kept in `failures`: SentencePiece loses its type."""
    try:
        for text in texts:
            for line in text.split("\n"):
                for start in range(0, len(line), LINE_CHARACTERS):
                    yield line[start : start + LINE_CHARACTERS]
    except (Exception, KeyboardInterrupt) as error:
        failures.append(error)
        raise


def _then(texts: Iterable[str], call: Callable[[], None]) -> Iterator[str]:
    yield from texts
    call()


def _check_absent(out: Path) -> None:
    if exists(out, follow=False):
        raise InputError(f"{out}: exists already; remove it or choose another name")


@contextmanager
def _claimed(out: Path) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes all of `out`. Before that, checks that only this process can write there.

    Raises InputError if it cannot, or if the file exists already.
    """
    hidden = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = claim(hidden, str(out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from error

    def write(content: bytes) -> None:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            hidden.replace(out)
        except OSError as error:
            raise InputError(f"{out}: cannot be written: {error.strerror}") from error

    try:
        _check_absent(out)  # another process may have written it in between
        yield write
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    finally:
        with suppress(OSError):  # on a full disk, writing the buffer fails once more
            file.close()


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),  # moves to and fro during learning, whose duration is not known
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
