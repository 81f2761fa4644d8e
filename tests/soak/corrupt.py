"""The corruption campaign: a run folder with three checkpoints is changed in hundreds of ways, each on its own copy.

`megalite-inspect-checkpoint verify`, `megalite-generate` and a resumed `megalite train` then run on it, after
`megalite-inspect-checkpoint index` where it is of format 1, each with a limit of time and memory. A violation is a
traceback, a command that does not end, damage that is taken for a checkpoint, an intact checkpoint that is not found,
a command that a file has run, or a change outside of the folder.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from corruptions import Case, cases

from megalite.base.entry import exit_code
from megalite.base.files import write_whole
from megalite.base.late_import import import_for_good
from megalite.commands.main import main as megalite
from megalite.commands.train import WORKER
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer
from megalite_tools.checkpoint.generate import main as generate
from megalite_tools.checkpoint.inspect_checkpoint import main as inspect
from megalite_tools.data.train_tokenizer import train_model
from megalite_tools.report_file import cpu_name

COMMAND = "corrupt"
LIMIT = 60  # seconds of a command
MEMORY = 16 << 30  # bytes of addresses, most of which PyTorch takes without using them
TEXT = ["def area(width, height):\n    return width * height\n", "The quick brown fox jumps over the lazy dog.\n"]
CONFIG = """\
run: {{dir: ., name: run, device: cpu}}
model: {{layers: 2, width: 16, heads: 2, kv_heads: 1, ffn: 24, vocab_size: {vocabulary}, sequence_length: 16}}
batch: {{micro: 1, global: 2}}
train: {{precision: fp32, timeout: {limit}}}
schedule: {{name: constant}}
checkpoint: {{interval: 10, keep: 0}}
log: {{interval: 10, tensorboard: false}}
data: {{train: [{{path: {folder}/tokens}}], tokenizer: {folder}/tokenizer.model}}
"""
RESUMED = re.compile(r"resuming at step (\d+)")
TRACEBACK = "Traceback (most recent call last)"
OUTCOMES = ("from 30", "from 20", "from 10", "from 0", "refused")
PAGE = """\
# Corrupted run folders

A run of 30 steps on two ranks leaves checkpoints of steps 10, 20 and 30. Its folder is changed in {cases} ways, each on
its own copy, and `megalite-inspect-checkpoint verify`, `megalite-generate` and a resumed `megalite train` (one rank)
run on it, after `megalite-inspect-checkpoint index` where it is of format 1. `make corrupt` writes this page, and only
where no command ended in a traceback, none had to be killed, no damage was taken for a checkpoint, every intact
checkpoint was found, no file ran a command, and nothing outside of the run folder was changed.

{table}

“From 20” means that training went on from step 20 and said why not from 30. Where an older checkpoint was changed, or
one was added that only looks newer, it goes on from 30. “Refused” is exit code 2 with a message: where all checkpoints
are damaged, for a later format, and for files of the run that cannot be written to. “From 0” is a new beginning, where
`checkpoints` was gone or an empty folder.

{machine}
"""


@dataclass(frozen=True)
class Ended:
    """A command."""

    code: int  # -1: it had to be killed
    output: str  # both streams


def call(command: Callable[[list[str]], int], arguments: list[str], folder: Path) -> Ended:
    """Run `command` in a fork of this process, in `folder`; all that it starts ends with it."""
    said = folder / "output"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.chdir(folder)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            stream = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
            code = command(arguments)
            sys.stdout.flush()
            os._exit(code)
        except BaseException:  # noqa: BLE001 - as Python itself would tell of it
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    code = _wait(child)
    return Ended(code, said.read_text(errors="replace"))


def _wait(child: int) -> int:
    """The exit code; −1 where the command must be killed."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def prepare(folder: Path) -> Path:
    """A run of 30 steps in `folder`, on two ranks; its configuration."""
    tokenizer = folder / "tokenizer.model"
    tokenizer.write_bytes(train_model(TEXT, vocab_size=320, kind="bpe", lines=1000))
    vocabulary = load_tokenizer(str(tokenizer)).vocab_size
    with StoreWriter(folder / "tokens", "<u2") as store:
        store.add(np.random.default_rng(0).integers(vocabulary, size=2000))
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(vocabulary=vocabulary, folder=folder, limit=LIMIT))
    ended = call(megalite, ["train", str(config), "train.steps=30", "parallel.dp_shard=2"], folder)
    if ended.code:
        raise RuntimeError(ended.output)
    shutil.copytree(folder / "run/checkpoints/step-00000010", folder / "elsewhere/step-00000010")
    return config


def attempt(case: Case, original: Path, config: Path, work: Path) -> tuple[str, list[str]]:
    """What became of a case in short, and its violations."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(original / "run", work / "run")
    shutil.copytree(original / "elsewhere", work / "elsewhere")
    outside = listing(work / "elsewhere")
    case.apply(work / "run")
    older = {"index": call(inspect, ["index", "run"], work)} if case.older else {}
    ended = {
        **older,
        "verify": call(inspect, ["verify", "run"], work),
        "generate": call(generate, ["run", "--tokens", "1"], work),
        "resume": call(megalite, ["train", str(config), "train.steps=32", "parallel.dp_shard=1"], work),
    }
    found = [f"{name}: {what}" for name, end in ended.items() for what in broken(end)]
    if case.damaged is not None and (ended["verify"].code == 0) == case.damaged:
        found.append("verify: " + ("damage is not found" if case.damaged else "damage is found where there is none"))
    if case.older and ended["index"].code != (2 if case.damaged else 0):
        found.append("index: " + ("makes good what is damaged" if case.damaged else "refuses what is intact"))
    resume = ended["resume"]
    step = next(iter(map(int, RESUMED.findall(resume.output))), 0) if resume.code == 0 else None
    if step not in case.steps:
        found.append(f"resume: goes on from {step}, not {' or '.join(map(str, case.steps))}")
    if step in (10, 20) and case.damaged is not False and "is used" not in resume.output:
        found.append("resume: says nothing of the damage")
    if (work / "executed").exists():
        found.append("a file has run a command")
    if listing(work / "elsewhere") != outside:
        found.append("something outside of the run folder is changed")
    said = [f"    {name} {end.code}: {line}" for name, end in ended.items() for line in end.output.splitlines()[-12:]]
    return "refused" if step is None else f"from {step}", [*found, *said] if found else []


def broken(end: Ended) -> list[str]:
    """What no command may do, whatever it is given."""
    found = ["does not end"] if end.code == -1 else []
    found += [f"exit code {end.code}"] if end.code not in (-1, 0, 1, 2) else []
    return found + (["traceback"] if TRACEBACK in end.output else [])


def listing(folder: Path) -> list[tuple[str, bytes]]:
    return sorted((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def campaign(
    chosen: Sequence[Case], jobs: int, say: Callable[[str], object]
) -> tuple[list[tuple[Case, str]], list[str]]:
    """Every case with what became of it, and all violations. jobs: cases at a time."""
    import_for_good(WORKER)  # once, for all forks
    outcomes, violations = [], []
    with tempfile.TemporaryDirectory(prefix="megalite-corrupt-") as folder:
        original = Path(folder, "original")
        original.mkdir()
        given = chosen, original, prepare(original), Path(folder)
        with ProcessPoolExecutor(jobs, get_context("fork"), _GIVEN.extend, (given,)) as pool:
            for case, (outcome, found) in zip(chosen, pool.map(_attempt, range(len(chosen))), strict=True):
                outcomes.append((case, outcome))
                violations += [f"{case.group}, {case.name}: {found[0]}", *found[1:]] if found else []
                told = f"{len(outcomes)} of {len(chosen)}: {case.group}, {case.name}: {outcome}"
                say(told + ", VIOLATION" * bool(found))
    return outcomes, violations


_GIVEN: list[Any] = []  # to a process of the pool, when it was forked: cases cannot be sent


def _attempt(number: int) -> tuple[str, list[str]]:
    chosen, original, config, folder = _GIVEN
    return attempt(chosen[number], original, config, folder / str(os.getpid()))


def page(outcomes: Sequence[tuple[Case, str]], seconds: float) -> str:
    """The result as Markdown."""
    counts = Counter((case.group, outcome) for case, outcome in outcomes)
    counts += Counter(("**all**", outcome) for _, outcome in outcomes)
    lines = [f"| what is changed | cases | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for group in dict.fromkeys(group for group, _ in counts):
        numbers = [counts[group, outcome] for outcome in OUTCOMES]
        lines.append(f"| {group} | {sum(numbers)} | {' | '.join(str(number or '') for number in numbers)} |")
    machine = f"{cpu_name()}, Python {platform.python_version()}, torch {version('torch')}, {seconds:.0f} s."
    return PAGE.format(cases=len(outcomes), table="\n".join(lines), machine=machine)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: no violation; 1: some."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, help="write the result to this Markdown file")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose group and name hold this")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="cases at a time (%(default)s)"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every n-th case")
    return exit_code(COMMAND, lambda: _main(parser.parse_args(argv)))


def _main(options: argparse.Namespace) -> int:
    began = time.monotonic()
    chosen = [case for case in cases() if options.only in f"{case.group}, {case.name}"][:: options.every]
    outcomes, violations = campaign(chosen, options.jobs, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{len(outcomes)} cases, {sum(not line.startswith(' ') for line in violations)} violations")
    for line in violations:
        print(line)
    if options.out and not violations:
        write_whole(options.out, page(outcomes, time.monotonic() - began))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
