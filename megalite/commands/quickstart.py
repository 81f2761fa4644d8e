"""`megalite quickstart`: a small model learns real text that is on every machine, and writes some.

The text is the Python sources of the standard library. Two processes do most of the training; eight continue it in
another layout.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.stop_signals import STOP_SIGNALS, listen, restore

DATA, RUN = Path("data/quickstart"), Path("runs/quickstart")  # as in configs/run/quickstart.yaml
LADDER = Path("data/ladder")  # as in configs/experiment/ladder_5x4.yaml
VOCABULARY, LADDER_VOCABULARY = 2048, 512
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}  # folders
MIN_FILE_BYTES = 1024  # bytes of a file; those of fewer have little to learn from
EIGHT_PROCESSES = ("parallel.pp=2", "parallel.tp=2", "batch.micro=4")
PROMPT = ("--prompt", "def read_file(path):\n    ", "--tokens", "100", "--temperature", "0.5", "--top-k", "20")
TRAIN_COMMAND = ("megalite.__main__", "main", "train", "quickstart")  # module, function and arguments of a program

Program = tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Do all parts, or with `args.data` only make data; the first code that is not 0 ends it and is returned."""
    if args.files:
        raise InputError(f"{args.files[0]}: quickstart trains a configuration of its own; give KEY=VALUE alone")
    sources = python_sources()
    print(f"Quick start: {len(sources)} Python files of {sysconfig.get_path('stdlib')}")
    folders = [folder for folder in (DATA, LADDER if args.data else RUN) if os.path.lexists(folder)]
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():
            raise InputError(f"{folder}: is a link or a file, where the quick start makes a folder anew; move it away")
    for folder in folders:
        shutil.rmtree(folder)
    parts = make_data(DATA, VOCABULARY, sources)
    parts += make_data(LADDER, LADDER_VOCABULARY, sources) if args.data else train_and_write(args.steps, args.overrides)
    for number, (heading, program) in enumerate(parts, 1):
        print(f"\n{number}/{len(parts)}  {heading}", flush=True)
        if program and (code := call(program)):
            return code
    return 0


def make_data(folder: Path, vocabulary: int, sources: Sequence[str]) -> list[tuple[str, Program]]:
    """The parts that make a tokenizer and token stores of the texts `sources`, each with its heading."""
    tokenizer, skip = str(folder / "tokenizer.model"), ("--on-error", "skip")
    train = ("--out", tokenizer, "--vocab-size", str(vocabulary), *skip)
    prepare = ("--tokenizer", tokenizer, "--out", str(folder / "python"), "--valid-fraction", "0.05", *skip)
    return [
        (f"Train a tokenizer of {vocabulary:,} pieces", _tool("train_tokenizer", *sources, *train)),
        ("Tokenize", _tool("prepare_data", *sources, *prepare)),
    ]


def train_and_write(steps: int, overrides: Sequence[str]) -> list[tuple[str, Program]]:
    """The parts that train, draw and write, each with its heading. An empty program is left out."""
    bulk = f"train.steps={steps - steps // 12}"
    draw = "Draw the loss curve, with a mark where the layout changed"
    can_draw = find_spec("matplotlib") is not None
    return [
        ("Train on two processes, each with a copy of the model", (*TRAIN_COMMAND, *overrides, bulk)),
        (
            "Go on with eight: two pipeline stages, two data-parallel ranks, tensor parallelism of two",
            (*TRAIN_COMMAND, *overrides, f"train.steps={steps}", *EIGHT_PROCESSES),
        ),
        (
            draw if can_draw else f"{draw}: left out, since matplotlib is not installed (pip install 'megalite[plot]')",
            _tool("plot_metrics", str(RUN)) if can_draw else (),
        ),
        ("Write some Python", _tool("generate", str(RUN), *PROMPT, "--seed", "1")),
    ]


def python_sources() -> list[str]:
    """Paths of the standard library's Python files, without tests and installed packages, in the order of bytes."""
    found: list[str] = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        found += [path for path in paths if os.lstat(path).st_size > MIN_FILE_BYTES]
    return sorted(found, key=os.fsencode)


def _tool(name: str, *arguments: str) -> Program:
    """A program of megalite_tools, which imports megalite: it is named here, and imported by its own process alone."""
    return "megalite_tools.commands", name, *arguments


def call(program: Program) -> int:
    """Run a program in a process of its own and return its exit code. Stop signals are handed on to it, except SIGINT,
    which a terminal sends to both."""
    module, function, *arguments = program
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as child:

        def hand_on(number: int, _: object) -> None:
            if number != signal.SIGINT:  # a terminal sends that to both
                child.send_signal(number)

        handlers = listen(hand_on, STOP_SIGNALS)
        try:
            ended = child.wait()
        finally:
            restore(handlers)
    return 128 - ended if ended < 0 else ended
