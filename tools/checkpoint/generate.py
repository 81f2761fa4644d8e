"""Continue a prompt with a trained model, in one process on the CPU."""

import argparse
import math
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path

import torch

from megalite.checkpoint.disk import DamagedError
from megalite.checkpoint.formats.tokenizer import kept_tokenizer
from megalite.checkpoint.host_group import HostGroup
from megalite.checkpoint.load import Restorer
from megalite.checkpoint.manifest import INDEX, NAME, Manifest, check_sizes, complete
from megalite.checkpoint.read import Reader
from megalite.checkpoint.state import State
from megalite.checkpoint.wanted import differences_from
from megalite.config.errors import InputError, printable
from megalite.config.layout import Layout
from megalite.config.schema import Config, Parallel, Train
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.dist.mesh import Mesh
from megalite.dist.start import start_alone
from megalite.entry import exit_code
from megalite.model.decoder import Decoder
from megalite.model.generate import Draw, sample
from megalite.plan.resolved import resolve
from megalite.train.build import build_stage

COMMAND = "megalite-generate"
LONGEST = 1 << 24  # bytes of a prompt, at most
CHARACTERS = 64  # of a prompt's end that are kept, per token that the model sees: no token is longer


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _generate(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one of its checkpoints")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: a new document)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with that text, in UTF-8; -: standard input")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to write (default: 100)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="randomness; 0: always the likeliest token (default: 0.7)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=40,
        metavar="K",
        help="draw among the K likeliest tokens; 0: among all (default: 40)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the fewest of the likeliest tokens whose chances add up to P (default: 1, all)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed writes the same text (default: 0)"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="use this instead of the run's copy")
    return parser


def _generate(options: argparse.Namespace) -> None:
    text = _prompt(options)
    draw = _draw(options)
    start_alone()
    folder, found = find_checkpoints(options.run)
    for path in reversed(found):
        try:
            _continue(folder, path, text, draw, options)
            break
        except DamagedError as error:
            if path == found[0]:
                raise
            print(f"{COMMAND}: warning: {error}; the checkpoint before is used", file=sys.stderr)


def _draw(options: argparse.Namespace) -> Draw:
    """How tokens are drawn. Raises InputError for options out of range."""
    rules = {
        "--tokens": (options.tokens, options.tokens >= 1, "must be at least 1"),
        "--temperature": (options.temperature, 0 <= options.temperature < math.inf, "must be a number of at least 0"),
        "--top-k": (options.top_k, options.top_k >= 0, "must be at least 0"),
        "--top-p": (options.top_p, 0 < options.top_p <= 1, "must be above 0 and at most 1"),
        "--seed": (options.seed, 0 <= options.seed < 1 << 63, "must be from 0 to 2**63 - 1"),
    }
    broken = [f"{name} {value}: {rule}" for name, (value, kept, rule) in rules.items() if not kept]
    if broken:
        raise InputError("; ".join(broken))
    return Draw(options.temperature, options.top_k, options.top_p, options.seed)


def _prompt(options: argparse.Namespace) -> str:
    """The text to continue, unchanged. Raises InputError if it is too large, or no UTF-8."""
    name, file = "--prompt", options.prompt_file
    if file is None:
        raw = os.fsencode(options.prompt)
    else:
        name = "standard input" if file == "-" else f"--prompt-file {file}"
        if file == "-" and sys.stdin is None:
            raise InputError(f"{name}: is closed; give --prompt")
        try:
            with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as stream:
                raw = stream.read(LONGEST + 1)
        except OSError as error:
            raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    if len(raw) > LONGEST:
        raise InputError(f"{name}: is longer than {LONGEST:,} bytes, more than any model reads; give its end")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: is no UTF-8 at byte {error.start}; convert it, for example with iconv") from None


def _continue(folder: Path, path: Path, text: str, draw: Draw, options: argparse.Namespace) -> None:
    """Write text with the checkpoint `path` of the run `folder`. Raises DamagedError before anything is written."""
    manifest = check_sizes(path)
    config = manifest.configuration
    tokenizer_file = options.tokenizer or kept_tokenizer(folder)
    if tokenizer_file is None:  # a path in a checkpoint is not opened: anybody may have written it
        trained = f", as {config.data.tokenizer!r:.200}" if config.data.tokenizer else ""
        raise InputError(f"{folder}: has no copy of the run's tokenizer; give --tokenizer{trained}")
    tokenizer = load_tokenizer(tokenizer_file)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"{tokenizer_file}: has {tokenizer.vocab_size} tokens, but the model of {path} knows "
            f"{config.model.vocab_size}; give the tokenizer that it was trained with"
        )
    end = tokenizer.eod if config.data.end_of_document is None else config.data.end_of_document
    longest = config.model.sequence_length
    prompt = tokenizer.encode(text[-longest * CHARACTERS :])
    if not prompt and end is None:
        raise InputError(f"{tokenizer_file}: has no end-of-document token to start from; give --prompt")
    decoder = load_decoder(path, manifest)
    print(printable(f"tokenizer: {tokenizer_file}"), file=sys.stderr)
    if len(prompt) > longest:
        print(f"{COMMAND}: warning: of the prompt, the model sees the last {longest:,} tokens only", file=sys.stderr)
    print(text, end="", flush=True)
    drawn = sample(decoder, prompt or [end], options.tokens, tokenizer.vocab_size, draw)
    _write(tokenizer, takewhile(lambda token: token != end, drawn))


def find_checkpoints(path: Path) -> tuple[Path, list[Path]]:
    """The run folder, and the checkpoints at `path`, oldest first: all of a run, or the one given."""
    if NAME.fullmatch(path.absolute().name):
        return Path(os.path.realpath(path)).parent.parent, [path]
    found = complete(path / "checkpoints")
    if not found:
        raise InputError(f"{path}: no checkpoint; give a run folder, or one of its checkpoints")
    return path, found


def load_decoder(path: Path, manifest: Manifest) -> Decoder:
    """The whole model in this process, in float32, from a checkpoint of any layout."""
    model = manifest.configuration.model
    if differ := differences_from(
        Reader.of_checkpoint(path, manifest).index, model
    ):  # reported before any memory is allocated
        raise DamagedError(path, f"{INDEX} does not have the tensors of its model: {differ}")
    alone = Config(model=model, parallel=Parallel(dp_shard=1), train=Train(precision="fp32"))
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    decoder = build_stage(resolve(alone), mesh, 0)
    Restorer(State({0: decoder}), alone, (), HostGroup()).weights(f"megalite:{path}")
    return decoder


def _write(tokenizer: Tokenizer, tokens: Iterable[int]) -> None:
    """Print the text token by token. A token may hold part of a character, so all tokens so far are decoded together.

    Characters that could disturb a terminal are escaped.
    """
    new: list[int] = []
    shown = ""
    for token in tokens:
        new.append(token)
        text = tokenizer.decode(new)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            more = text[len(shown) :]
            print(printable(more, kept="\n\t") if sys.stdout.isatty() else more, end="", flush=True)
            shown = text
    print()


if __name__ == "__main__":
    sys.exit(main())
