"""The `megalite` command: reads its arguments and hands over to the module of the chosen command."""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from megalite import __version__
from megalite.base.entry import exit_code
from megalite.base.exit_codes import ExitCode, table
from megalite.base.late_import import import_for_good
from megalite.commands.plan.amounts import DEFAULT_CLUSTER, amount, gpu_counts
from megalite.config.load import files_and_overrides
from megalite.config.rules.ranges import MAX_RANKS
from megalite_launch.base.arguments import above_zero, whole

COMMANDS = {  # module and summary
    "train": ("megalite.commands.train", "train a model, or continue its training"),
    "verify": ("megalite.commands.verify", "compare the layout with a single process, step by step in float64"),
    "plan": ("megalite.commands.plan.plan", "find the fastest layouts of a model on a cluster, and explain them"),
    "show": ("megalite.commands.show.show", "print the resolved configuration, the layout, sizes and FLOPs"),
    "report": (
        "megalite.commands.report.report",
        "write one page about a run: its model, loss, speed and checkpoints",
    ),
    "profile": ("megalite.commands.profile", "tell and draw where the time of a run's profiled steps went"),
    "list": (
        "megalite.commands.list_presets",
        "list the models, runs, experiments, clusters and scripts that megalite comes with",
    ),
    "quickstart": ("megalite.commands.quickstart", "train a small model on the sources of Python: minutes on a CPU"),
}
INPUTS = {  # arguments of commands that take no CONFIG: how their usage calls them, and help
    "profile": ("RUN", "the run folder, in which profile.start=STEP has recorded some steps"),
    "report": ("RUN", "the run folder, run.dir/run.name"),
    "list": ("NAME", "print this file in place of the list, to read, copy or change it"),
    "quickstart": ("KEY=VALUE", "a key that is changed in both trainings"),
}
COUNT, GIBIBYTES = whole(1, MAX_RANKS), above_zero("a number of GiB above 0, as in 70")
VERIFY_STEPS = whole(1, 1000)  # later, rounding has grown to differences of its own
CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "verify, plan --dry-run: a difference above the tolerance",
    ExitCode.BAD_INPUT: "bad input, or a stdout that cannot be written to",
    ExitCode.STOPPED: "stopped by a signal; a run can be resumed",
    ExitCode.UNHEALTHY: "unhealthy training",
    ExitCode.LOST_CONTACT: "lost contact with other ranks, or the run folder to another job",
    ExitCode.INTERRUPTED: "interrupted from the keyboard; train: for the second time",
    ExitCode.READER_LEFT: "the reader of the output has left",
}
EPILOG = f"""\
CONFIG is a YAML file, or a name that `megalite list` shows; several are merged,
the later over the earlier.
KEY=VALUE changes one key, as in model.layers=8, over all files.
For show, CONFIG may be weights: hf:PATH is a Hugging Face folder.
docs/configuration.md lists the keys.

{table(CODES)}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, one of `CODES`."""
    return exit_code("megalite", lambda: _run(_parse(argv)))


def _run(args: argparse.Namespace) -> int:
    # By name and only now, so that help and `show` need not wait for torch.
    code: int = import_for_good(COMMANDS[args.command][0]).run(args)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "megalite",
        description="Pretrain Llama-class language models, on a laptop's CPU or on a cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megalite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        metavar, about = INPUTS.get(name, ("CONFIG | KEY=VALUE", "a YAML file or a name, or a key that is changed"))
        command.add_argument("arguments", nargs="*", metavar=metavar, help=about)
    for name, options in OPTIONS.items():
        options(commands.choices[name])
    given = sys.argv[1:] if argv is None else argv
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(f"argument COMMAND: invalid choice: {given[0]!r}{_near(given[0], COMMANDS)}")
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments from one side of an option only; the others are left here.
    command = commands.choices[args.command]
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        known = command.format_usage().replace("[", " ").replace("]", " ").split()
        near = _near(unknown[0].partition("=")[0], [word for word in known if word.startswith("--")])
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    _check_options(args, command)
    args.given = list(given)
    args.files, args.overrides = files_and_overrides([*args.arguments, *rest])
    return args


def _check_options(args: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """Ends the program if options do not go together."""
    if args.command == "train" and args.world_size is not None and not args.check:
        command.error("argument --world-size: needs --check")
    if args.command == "show" and args.measure and not args.memory:
        command.error("argument --measure: needs --memory")
    if args.command == "show" and args.memory and args.schedule is not None:
        command.error("argument --memory: not allowed with argument --schedule; each is shown by itself")


def _quickstart_options(quickstart: argparse.ArgumentParser) -> None:
    quickstart.epilog = "data/quickstart and runs/quickstart are made anew."
    quickstart.add_argument("--steps", type=COUNT, default=900, metavar="N", help="training steps (default: 900)")
    quickstart.add_argument(
        "--data", action="store_true", help="only make the data of the experiments: data/quickstart and data/ladder"
    )


def _train_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--check",
        action="store_true",
        help="check configuration, data and checkpoint, print what would start, and end",
    )
    train.add_argument("--world-size", type=COUNT, metavar="N", help="with --check: number of ranks of the job")
    train.add_argument(
        "--resolved", action="store_true", help="print the configuration as one YAML file, unchecked, and end"
    )


def _verify_options(verify: argparse.ArgumentParser) -> None:
    verify.add_argument(
        "--steps",
        type=VERIFY_STEPS,
        default=3,
        metavar="N",
        help="optimizer steps to compare (default: 3)",
    )
    verify.add_argument(
        "--tolerance", type=_tolerance, default=1e-10, metavar="X", help="largest difference allowed (default: 1e-10)"
    )
    verify.add_argument("--json", metavar="FILE", help="also write the comparison there")
    verify.add_argument(
        "--masked", action="store_true", help="train only some tokens, and none of many samples, as masks of data do"
    )


def _show_options(show: argparse.ArgumentParser) -> None:
    show.add_argument(
        "--write", metavar="FILE", help="save the model, of a folder of weights for example, as a configuration FILE"
    )
    show.add_argument("--world-size", type=COUNT, metavar="N", help="number of ranks that the job will have")
    show.add_argument(
        "--schedule",
        nargs="?",
        const="",
        metavar="FILE",
        help="print the timeline of the pipeline schedule instead; FILE: also write it there, as a picture (.svg) or a "
        "schedule file (.yaml)",
    )
    show.add_argument(
        "--memory", action="store_true", help="print the predicted memory of the ranks at the peak of a step instead"
    )
    show.add_argument(
        "--measure", action="store_true", help="with --memory: also count the fullest rank's memory in a dry run"
    )
    show.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="in place of run.cluster: also print whether it fits there, step time, duration and cost; with --memory, "
        "whether it fits; with --schedule, an auto order for it",
    )


EXAMPLE = "Example: megalite plan llama3_8b --cluster h100 --gpus 64-512 --tokens 1T --days 30"


def _plan_options(plan: argparse.ArgumentParser) -> None:
    """The options of `megalite plan`. A key that is given as KEY=VALUE is pinned: the search keeps its value."""
    plan.epilog = EXAMPLE
    add = plan.add_argument
    compared = "number of GPUs; several, or those from A to B by halves of doublings, are compared"
    add("--gpus", type=gpu_counts, metavar="N|N,N|A-B", help=compared)
    add("--cluster", metavar="NAME|FILE", help=f"the GPUs and their network (default: {DEFAULT_CLUSTER})")
    add(
        "--max-memory",
        type=GIBIBYTES,
        metavar="GIB",
        help="what tensors may take of a GPU (default: nine tenths)",
    )
    add("--tokens", type=amount, metavar="T", help="of the whole run, as in 300B or 15T: adds days, cost and energy")
    add("--days", type=above_zero(), metavar="D", help="with --tokens: the longest run")
    add("--budget", type=amount, metavar="USD", help="with --tokens: the most expensive run")
    add("--top", type=COUNT, metavar="N", help="layouts to show (default: 5)")
    add(
        "--pick",
        type=COUNT,
        metavar="ROW",
        help="take this row in place of the first: to explain, write and draw it",
    )
    add("--offload", action="store_true", help="also try tensors in host memory")
    add(
        "--routing",
        choices=("balanced", "natural"),
        help="how tokens choose experts: equally often (default), or as published runs do that nothing balances",
    )
    add("--exhaustive", action="store_true", help="look at every layout closely, which takes minutes")
    add("--as-is", action="store_true", help="plan the layout that CONFIG has; no search")
    add("--explain", action="store_true", help="where time and memory go, and which single change would help most")
    add("--compare", action="store_true", help="the layouts of several CONFIGs beside each other; no search")
    add("--dry-run", action="store_true", help="compare predictions with what dry runs of the real code count")
    add("--write", metavar="FILE", help="save the fastest layout, or that of --pick, as a configuration FILE")
    add(
        "--schedule", metavar="FILE", help="search an order for the pipeline of the fastest layout, and save it (.yaml)"
    )
    add("--html", metavar="FILE", help="save a page with pictures, which needs no network")


def _report_options(report: argparse.ArgumentParser) -> None:
    report.add_argument("--html", metavar="FILE", help="write the page there (default: RUN/report.html)")
    report.add_argument(
        "--cluster", metavar="NAME|FILE", help="predict the time of a step there (default: run.cluster, or by the GPUs)"
    )


OPTIONS = {
    "quickstart": _quickstart_options,
    "train": _train_options,
    "verify": _verify_options,
    "plan": _plan_options,
    "show": _show_options,
    "report": _report_options,
}


def _near(word: str, known: Iterable[str]) -> str:
    """Suggest a known word close to one that is not known, or list all known ones."""
    listed = list(known)
    found = get_close_matches(word, listed, 1)
    return f"; did you mean {found[0]}?" if found else f" (choose from {', '.join(listed)})"


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a number of at least 0 and below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
