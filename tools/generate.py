"""Continue a prompt with a trained model, in one process on the CPU."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch

from megalite.checkpoint.load import Restorer
from megalite.checkpoint.manifest import NAME, complete
from megalite.checkpoint.state import State
from megalite.checkpoint.together import Together
from megalite.config.errors import InputError
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.schema import Config, Parallel, Train
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.dist.mesh import Mesh
from megalite.dist.start import start_alone
from megalite.entry import exit_code
from megalite.model.decoder import Decoder
from megalite.model.generate import sample
from megalite.train.build import build_stage
from megalite.train.starts import kept_tokenizer

COMMAND = "megalite-generate"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done; 2: bad input."""
    return exit_code(COMMAND, lambda: _generate(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to write (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest (default: 0.7)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="draw among K; 0: all (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--tokenizer", help="instead of the run's own")
    return parser


def _generate(options: argparse.Namespace) -> None:
    if options.tokens < 1 or options.temperature < 0 or options.top_k < 0:
        raise InputError("--tokens must be at least 1, --temperature and --top-k at least 0")
    folder, checkpoint = find_checkpoint(options.run)
    config = load([str(folder / "config.yaml")], [])
    path = options.tokenizer or kept_tokenizer(folder) or config.data.tokenizer
    if path is None:
        raise InputError(f"{folder / 'config.yaml'}: data.tokenizer is not set; give --tokenizer")
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise InputError(
            f"{path}: has {tokenizer.vocab_size} tokens, but the model of {folder} knows {config.model.vocab_size}; "
            "give the tokenizer that it was trained with"
        )
    end = tokenizer.eod if config.data.end_of_document is None else config.data.end_of_document
    prompt = tokenizer.encode(options.prompt)
    if not prompt and end is None:
        raise InputError(f"{path}: has no end-of-document token to start from; give --prompt")
    decoder = load_decoder(config, checkpoint)
    print(f"tokenizer: {path}", file=sys.stderr)
    print(options.prompt, end="", flush=True)
    _write(decoder, tokenizer, prompt or [end], end, options)


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that `path` means: a run's newest, or the one given."""
    if NAME.fullmatch(path.name):
        return path.resolve().parent.parent, path
    found = complete(path / "checkpoints")
    if not found:
        raise InputError(f"{path}: no checkpoint; give a run folder, or one of its checkpoints")
    return path, found[-1]


def load_decoder(config: Config, checkpoint: Path) -> Decoder:
    """The whole model in this process, in float32, from a checkpoint of any layout."""
    start_alone()
    alone = replace(config, parallel=Parallel(dp_shard=1), train=Train(precision="fp32"), kernels="auto")
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    decoder = build_stage(alone, mesh, 0, 1)
    Restorer(State({0: decoder}), alone, (), Together()).weights(checkpoint)
    return decoder


def _write(
    decoder: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], end: int | None, options: argparse.Namespace
) -> None:
    """Print the text as it comes; a token may hold part of a character, so what is decoded is the whole."""
    new: list[int] = []
    shown = ""
    drawn = sample(
        decoder, prompt, options.tokens, tokenizer.vocab_size, options.temperature, options.top_k, options.seed
    )
    for token in takewhile(lambda token: token != end, drawn):
        new.append(token)
        text = tokenizer.decode(new)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()


if __name__ == "__main__":
    sys.exit(main())
