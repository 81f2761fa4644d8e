"""Measure training steps of megalite beside other programs, and whatever else a plan lists; docs/gpu.md says how."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite_launch.base.arguments import above_zero
from megalite_tools.bench.training.cases import Case, Target, read_plan
from megalite_tools.bench.training.keeping import Keeper
from megalite_tools.bench.training.parent import CaseRunner, Machine
from megalite_tools.bench.training.report import can_be_shown
from megalite_tools.bench.training.rows import Rows

COMMAND = "megalite-bench-training"
COMMIT = "MEGALITE_COMMIT"  # environment: the commit of code that is not in a checkout
COMMANDS = {
    "run": "run the cases of a plan, one process each, until none is left or fits the time",
    "one": "run a single case in this process",
    "probe": "measure what the machine can do at best",
    "table": "print the table of the rows in a folder",
}
PLAN = "tools/bench/slot/plan.yaml"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(COMMAND, lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    work = {"run": _cases, "one": _one, "probe": _probe, "table": _table}[options.what]
    return work(options, shlex.join([COMMAND, *arguments]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    subs = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    run, one, probe, table = (subs.add_parser(name, help=told, description=told) for name, told in COMMANDS.items())
    for sub in (run, one, probe, table):
        sub.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the work folder, with its rows")
    for sub in (run, one):
        sub.add_argument(
            "--plan", type=Path, default=Path(PLAN), metavar="YAML", help="the plan (default: %(default)s)"
        )
    for sub in (run, one, probe):
        sub.add_argument(
            "--device", choices=("cuda", "cpu"), default="cuda", help="where cases run (default: %(default)s)"
        )
        sub.add_argument("--tiny", action="store_true", help="tiny sizes, to rehearse a plan on a CPU")
    run.add_argument(
        "--seconds",
        type=above_zero(),
        default=520.0,
        help="to run cases in (default: %(default)s)",
    )
    run.add_argument("--part", type=int, metavar="N", help="only cases of this part of the plan")
    run.add_argument("--cases", nargs="+", metavar="ID", help="some of the plan's cases (default: all)")
    run.add_argument("--again", nargs="+", default=[], metavar="ID", help="cases to run though they have a row")
    run.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="a folder that has all that is worth keeping at every moment"
    )
    one.add_argument("--case", required=True, metavar="ID", help="the case of the plan")
    return parser


def _cases(options: argparse.Namespace, command: str) -> int:
    end = time.monotonic() + options.seconds
    target, plan, out = _target(options), options.plan.absolute(), options.out.absolute()
    cases = read_plan(plan, target)
    chosen = [case for case in _chosen(cases, options.cases, plan) if options.part in (None, case.part)]
    if not chosen:
        raise InputError(f"--part {options.part}: {plan} has no such part, or none of --cases is in it")
    _chosen(cases, options.again, plan)
    machine = Machine.found(target)
    if machine.gpus == 0:
        raise InputError("nvidia-smi finds no GPU here; --device cpu --tiny rehearses a plan without one")
    console = Console(stderr=True, highlight=False)
    keep = options.keep and options.keep.absolute()
    keeper = Keeper(out, keep, cases, chosen, command)
    with console.status("starting") as status:

        def say(line: str) -> None:
            console.print(Text(f"{end - time.monotonic():4.0f} s left  {line}"), soft_wrap=True)

        def begin(case: Case) -> None:
            status.update(Text(f"{case.id}, for at most {case.limit:.0f} s"))

        runner = CaseRunner(
            folder=out,
            plan=plan,
            machine=machine,
            commit=commit(),
            left=lambda: end - time.monotonic(),
            say=say,
            begin=begin,
            changed=keeper.keep,
            log=(keep or out) / "running.log",
            again=frozenset(options.again),
        )
        late = runner.run(chosen)
    print(keeper.page(runner.rows), end="")
    if late:
        print(f"{COMMAND}: no time was left for {', '.join(late)}; the same command goes on there", file=sys.stderr)
    return ExitCode.STOPPED if late else ExitCode.DONE


def _chosen(cases: list[Case], names: list[str] | None, plan: Path) -> list[Case]:
    if names is None:
        return cases
    known = {case.id: case for case in cases}
    for name in names:
        if name not in known:
            raise InputError(f"{plan}: has no case {name!r:.100}; it has {', '.join(known)}")
    return [case for case in cases if case.id in names]


def _one(options: argparse.Namespace, _: str) -> int:
    single = import_module("megalite_tools.bench.training.single")  # imports torch, which the parent must not have
    (case,) = _chosen(read_plan(options.plan, _target(options)), [options.case], options.plan)
    return int(single.run_one(case, _target(options), options.out.absolute(), sys.argv[1:]))


def _probe(options: argparse.Namespace, _: str) -> int:
    device = import_module("megalite_tools.bench.device")  # as above
    more = ["--tiny"] if options.tiny else []
    return int(device.main(["--json", str(options.out / "probe.json"), "--device", options.device, *more]))


def _table(options: argparse.Namespace, command: str) -> int:
    rows = Rows(options.out / "rows").read(accepts=can_be_shown)
    if not rows:
        raise InputError(f"{options.out}: has no rows; give the folder that `run --out` was given")
    print(Keeper(options.out, None, [], [], command).page(rows), end="")
    return ExitCode.DONE


def _target(options: argparse.Namespace) -> Target:
    return Target(options.device, options.tiny)


def commit() -> str:
    """The commit of the code that runs, with `-dirty` where files differ from it; "unknown" if it is not known."""
    if told := os.environ.get(COMMIT):
        return told
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        ended = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
        if ended.returncode == 0:
            return ended.stdout.strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
