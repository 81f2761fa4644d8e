"""Continue prompts with a trained model, on a CPU or GPU, or on several of them where one is too small."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_output, write_whole
from megalite.checkpoint.store.state import State
from megalite.data.tokenizer import Tokenizer
from megalite.inference.draft import DraftedSteps
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine, check_layout
from megalite.inference.generate import Drawn, Request, Steps, Timing, generate
from megalite.inference.prompts import Prompt, prompt_of, read_prompt, read_prompts, requests
from megalite.inference.ranks import ComputeSetup, add_options, alone, run
from megalite.inference.source import Opened, open_newest, open_tokenizer, to_open
from megalite.inference.write import show, stream, write_lines
from megalite_tools.checkpoint.chat_prompts import read_conversations, rendered, user_turn
from megalite_tools.data.conversations import Conversation
from megalite_tools.terminal import print_warning

COMMAND, MODULE = "megalite-generate", "megalite_tools.checkpoint.generate"


def main(argv: list[str] | None = None) -> int:
    """Runs the program, or one of its ranks. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(COMMAND, lambda: _main(arguments, _parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or weights such as hf:FOLDER")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: a new document)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with that text, in UTF-8; -: standard input")
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        help='many of them: JSON Lines of {"prompt": TEXT} or {"tokens": [IDS]}, or the lines of a .txt; -: standard '
        "input. Answered in JSON Lines",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer conversations by the tokenizer's chat template: the prompt is the user's message, and lines of "
        "--prompts have messages, as megalite-prepare-data --chat reads them",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: system message of conversations that have none")
    parser.add_argument("--template", metavar="FILE", help="with --chat: use this chat template, in Jinja")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts for every prompt (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON Lines to this file, whole or not at all")
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
    parser.add_argument(
        "--draft",
        action="store_true",
        help="draft a token ahead with multi-token prediction: the same text, in fewer passes",
    )
    parser.add_argument("--ignore-end", action="store_true", help="go on after the end of a document")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="texts written at a time (default: 16)")
    parser.add_argument("--tokenizer", metavar="FILE", help="use this instead of the run's copy")
    add_options(parser)
    return parser


def _main(arguments: list[str], options: argparse.Namespace) -> int:
    draw = _draw(options)
    for name in ("system", "template"):
        if getattr(options, name) is not None and not options.chat:
            raise InputError(f"--{name}: is for --chat; add it, or leave this out")
    if "-" in (options.prompts, options.prompt_file) and not alone(options):
        raise InputError("standard input is for a single rank; give the prompts in a file")
    if options.out is not None:
        check_output(options.out)
        if not os.access(options.out.parent, os.W_OK):
            raise InputError(f"--out {options.out}: its folder is missing or cannot be written to")
    return run(MODULE, arguments, options, partial(_work, options, draw))


def _draw(options: argparse.Namespace) -> Draw:
    """Settings for drawing tokens. Raises InputError for options out of range."""
    rules = {
        "--tokens": (options.tokens, options.tokens >= 1, "must be at least 1"),
        "--samples": (options.samples, options.samples >= 1, "must be at least 1"),
        "--batch": (options.batch, options.batch >= 1, "must be at least 1"),
        "--temperature": (options.temperature, 0 <= options.temperature < math.inf, "must be a number of at least 0"),
        "--top-k": (options.top_k, options.top_k >= 0, "must be at least 0"),
        "--top-p": (options.top_p, 0 < options.top_p <= 1, "must be above 0 and at most 1"),
        "--seed": (options.seed, 0 <= options.seed < 1 << 63, "must be from 0 to 2**63 - 1"),
    }
    broken = [f"{name} {value}: {rule}" for name, (value, kept, rule) in rules.items() if not kept]
    if broken:
        raise InputError("; ".join(broken))
    return Draw(options.temperature, options.top_k, options.top_p, options.seed)


def _prompts(options: argparse.Namespace) -> list[Prompt] | list[Conversation]:
    if options.prompts is not None:
        return read_conversations(options.prompts) if options.chat else read_prompts(options.prompts)
    prompt = prompt_of(options.prompt) if options.prompt_file is None else read_prompt(options.prompt_file)
    return [user_turn(prompt)] if options.chat else [prompt]


def _work(options: argparse.Namespace, draw: Draw, place: ComputeSetup) -> int:
    """Be one rank: write with the newest checkpoint that is not damaged."""
    prompts, lines = place.group.once(lambda: _prompts(options)), list[str]()
    for source, base in to_open(options.run, options.adapter):
        adapter = None if base is None else source
        use = partial(_write, options, draw, prompts, place, adapter, lines)
        open_newest(source, use, place.group, partial(print_warning, COMMAND), base)
    if options.out is not None and place.leads:
        write_whole(options.out, "".join(lines))
    return ExitCode.DONE


def _write(
    options: argparse.Namespace,
    draw: Draw,
    asked: list[Prompt] | list[Conversation],
    place: ComputeSetup,
    adapter: str | None,
    lines: list[str],
    opened: Opened,
) -> None:
    """Write with one checkpoint, to `lines` if they are for a file. Raises DamagedError before anything is written.

    adapter: what is told beside the texts, where there is one.
    """
    leading: list[tuple[Tokenizer, list[Prompt]]] = []  # the tokenizer and prompts of the rank that leads

    def ask() -> tuple[list[Request], list[str], int, int | None, frozenset[int]]:
        tokenizer, end = open_tokenizer(opened, options.tokenizer)
        chats = [each for each in asked if isinstance(each, Conversation)]
        prompts, turn = [each for each in asked if isinstance(each, Prompt)], None
        if chats:
            prompts, turn = rendered(chats, tokenizer, options.template, options.system)
        leading.append((tokenizer, prompts))
        length = opened.model.sequence_length
        begin = tokenizer.begin if opened.begins else ()
        found, warnings = requests(prompts, tokenizer, end, length, options.tokens, options.samples, begin)
        if options.ignore_end:
            return found, warnings, tokenizer.vocab_size, None, frozenset()
        return found, warnings, tokenizer.vocab_size, end, opened.ends | ({turn} if turn is not None else set())

    check_layout(opened.model, place.mesh.layout)
    if options.draft:
        opened = opened.with_mtp()
        if place.mesh.layout.ep > 1:
            raise InputError("--draft: cannot be used with --ep, whose ranks make every pass together; leave it out")
    texts, warnings, vocabulary, end, ends = place.group.once(ask)
    engine = Engine(opened.model, place.mesh, place.dtype)
    opened.fill(State({engine.stage: engine.decoder}), place.group)
    timings = [Timing()]
    mine = texts[place.mesh.dp_rank :: place.mesh.layout.dp]
    steps = DraftedSteps if options.draft else Steps
    here = generate(engine, mine, draw, options.batch, vocabulary, end, timings[0], lambda new: new[-1] in ends, steps)
    drawn = _of_all(here, place, timings)
    if not place.leads:
        for _ in drawn:
            pass
        return
    ((tokenizer, prompts),) = leading
    print(printable(f"tokenizer: {tokenizer.path}"), file=sys.stderr)
    for warning in warnings:
        print_warning(COMMAND, warning)
    write: Callable[[str], Any] = partial(print, end="", flush=True) if options.out is None else lines.append
    if options.prompts is None and options.samples == 1 and options.out is None:
        if adapter is not None:
            print(printable(f"── {adapter}"), flush=True)
        if not options.chat:
            show(prompts[0].text or "")
        stream(tokenizer, prompts[0], drawn)
    else:
        write_lines(prompts, options.samples, tokenizer, drawn, write, {} if adapter is None else {"adapter": adapter})
    print(reduce(Timing.beside, timings), file=sys.stderr)


def _of_all(here: Iterable[Drawn], place: ComputeSetup, timings: list[Timing]) -> Iterator[Drawn]:
    """Tokens as this copy of the model draws them. On the rank that leads, those of other copies follow.

    timings: this copy's, to which the others are added.
    """
    if place.mesh.layout.dp == 1:
        yield from here
        return
    kept = []
    for each in here:
        kept.append(each)
        yield each
    at = place.mesh.coordinates
    told = place.group.gather((timings[0], kept) if place.mesh.dp_rank and at["pp"] == at["tp"] == 0 else None)
    for timing, others in filter(None, told or ()):
        timings.append(timing)
        yield from others


if __name__ == "__main__":
    sys.exit(main())
