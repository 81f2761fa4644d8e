"""`megalite-goodput`: how much of a run's time counts: of runs to come, simulated, or of a run that there is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

from ..base.errors import UserError
from ..base.outcome import DONE
from ..base.texts import lasting, printable, table
from ..base.texts import share as share_text
from ..watch.run import open_run
from ..watch.summary import Summary, summary
from ..watch.text import ACCOUNT_NAMES
from .formulas import HOURS_BETWEEN_FAILURES, Costs, approximation, between_failures, daly, share, young
from .learned import failure_rate, learned_interval
from .simulate import simulate

DAY = 86_400.0
MAX_GPUS, MAX_RUNS, MAX_SECONDS = 2**24, 100_000, 1e9
MAX_FAILURES = 20_000_000  # failures that are simulated in all: about half a minute


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["simulate"]:
        return _simulate(arguments[1:])
    parser = argparse.ArgumentParser(
        "megalite-goodput",
        description=__doc__,
        epilog="megalite-goodput simulate --help tells how to simulate runs to come.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run: run.dir/run.name; or the word simulate")
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_args(arguments)
    run = open_run(given.run)
    run.update()
    found = summary(run)
    advised = advice(found)
    if given.json:
        kept = {name: found[name] for name in ("run", "wall", "accounts", "goodput", "goodput_without_waiting")}
        print(json.dumps({**kept, "failures": found["failures"], "advice": advised}, allow_nan=False))
    else:
        print(_account_text(found))
        print()
        print(_advice_text(found, advised))
    return DONE


def advice(found: Summary) -> dict[str, Any]:
    """The interval that a run should have, from what it has measured; without `steps` where too little is known."""
    rate = failure_rate(found["failures"], found["rank_hours"])
    low, high = rate.quantile(0.05), rate.quantile(0.95)
    checkpoint, ranks = found["checkpoint"], found["ranks"]
    advised: dict[str, Any] = {
        "failures": found["failures"],
        "rank_hours": found["rank_hours"],
        "hours_between_failures": rate.hours,
        "interval_of_hours": [1 / high, 1 / low],
        "steps": None,
    }
    step, save = found["usual_step_seconds"], checkpoint["save_seconds"]
    if step is None or save is None or not ranks:
        return advised
    write = checkpoint["write_seconds"] or 0.0
    steps, most, fewest = (
        max(round(learned_interval(each, rate, found["rank_hours"], ranks, save, write) / step), 1)
        for each in (rate.mean, low, high)
    )
    seconds = steps * step
    return {
        **advised,
        "steps": steps,
        "steps_between": [fewest, most],
        "seconds": seconds,
        "save_seconds": save,
        "write_seconds": write,
        "step_seconds": step,
        "expected_share": share(Costs(between_failures(ranks, rate.hours), save, write), max(seconds, write)),
    }


def _account_text(found: Summary) -> str:
    rows = [
        (text, lasting(found["accounts"][name]), f"{found['accounts'][name]:,.1f} s")
        for name, text in ACCOUNT_NAMES.items()
    ]  # fmt: skip
    rows.append(("all", lasting(found["wall"]), f"{found['wall']:,.1f} s"))
    told = share_text(found["goodput_without_waiting"])
    return "\n".join(
        [
            printable(found["run"]),
            "",
            table(("where time went", "", ""), rows),
            "",
            f"goodput {share_text(found['goodput'])}; {told} without waiting for jobs; "
            f"{found['lost_steps']:,} steps done again",
        ]
    )


def _advice_text(found: Summary, advised: dict[str, Any]) -> str:
    low, high = advised["interval_of_hours"]
    hours = advised["hours_between_failures"]
    lines = [
        f"failures: {advised['failures']} in {advised['rank_hours']:,.1f} hours of ranks; beside what was known before "
        f"(most often one in {HOURS_BETWEEN_FAILURES:,.0f}), {hours:,.0f} hours between failures of a rank, "
        f"with 90 % certainty {low:,.0f} to {high:,.0f}"
    ]
    if advised["steps"] is None:
        missing = "a checkpoint" if found["usual_step_seconds"] is not None else "a step"
        missing = missing if found["ranks"] else "a start, which tells the number of ranks,"
        return "\n".join([*lines, f"no interval can be advised: {missing} has not been measured yet"])
    fewest, most = advised["steps_between"]
    lines.append(
        f"a save stops training for {lasting(advised['save_seconds'])} and is written in "
        f"{lasting(advised['write_seconds'])}; a step takes {lasting(advised['step_seconds'])}"
    )
    lines.append(
        f"advice: checkpoint.interval={advised['steps']}, a checkpoint every {lasting(advised['seconds'])} "
        f"(between {fewest:,} and {most:,} steps within that certainty); checkpoint.interval=auto does this by itself"
    )
    return "\n".join(lines)


def _simulate(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("megalite-goodput simulate", description="Simulate runs with random failures.")
    add = parser.add_argument
    add("--gpus", required=True, metavar="N[,N…]", help="GPUs of a job; of several sizes, a line each")
    add("--mtbf-gpu-hours", type=float, default=HOURS_BETWEEN_FAILURES, metavar="HOURS",
        help="between failures of one GPU (default 50,677, of Llama 3's training)")  # fmt: skip
    add("--save-seconds", type=float, required=True, metavar="S", help="that a save stops training")
    add("--write-seconds", type=float, default=0.0, metavar="S", help="then, until it can be resumed from (default 0)")
    add("--detect", type=float, default=60.0, metavar="S", help="from a failure until it is noticed (default 60)")
    add("--restart", type=float, default=120.0, metavar="S", help="from then on to the first step (default 120)")
    add("--interval", default="auto", metavar="S|auto", help="of training between saves; auto: by Daly's formula")
    add("--days", type=float, default=54.0, help="that a run lasts (default 54)")
    add("--runs", type=int, default=200, help="that are simulated (default 200)")
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    add("--json", action="store_true", help="one object for each number of GPUs")
    given = parser.parse_args(arguments)
    sizes, costs, intervals = _asked(given)
    rows = []
    for gpus, of, interval in zip(sizes, costs, intervals):
        found = simulate(of, interval, given.days * DAY, given.runs, given.seed)
        told = {
            "gpus": gpus,
            "hours_between_failures": of.between / 3600,
            "interval": interval,
            "young": young(of),
            "daly": daly(of),
            "goodput": found.mean,
            "error": found.error if isfinite(found.error) else None,
            "runs_between": [found.low, found.high],
            "failures": found.failures,
            "exact": share(of, interval),
            "approximation": approximation(of, interval),
        }
        rows.append(told)
    if given.json:
        for told in rows:
            print(json.dumps(told, allow_nan=False))
    else:
        print(_simulated_text(rows, given))
    return DONE


def _asked(given: argparse.Namespace) -> tuple[list[int], list[Costs], list[float]]:
    """The sizes of jobs, and for each its costs and interval. Raises UserError."""
    words = given.gpus.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word[:12]) <= MAX_GPUS for word in words):
        raise UserError(f"--gpus {printable(given.gpus)}: must be numbers from 1 to {MAX_GPUS:,}, as 256,1024")
    for name, least in (("mtbf_gpu_hours", 1e-3), ("save_seconds", 0.0), ("write_seconds", 0.0), ("detect", 0.0),
                        ("restart", 0.0), ("days", 1e-3)):  # fmt: skip
        value = getattr(given, name)
        if not least <= value <= MAX_SECONDS:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: must be from {least:g} to {MAX_SECONDS:g}")
    if not 2 <= given.runs <= MAX_RUNS:
        raise UserError(f"--runs {given.runs}: must be from 2 to {MAX_RUNS:,}, so that there is an interval")
    sizes = [int(word) for word in words]
    costs = [
        Costs(between_failures(gpus, given.mtbf_gpu_hours), given.save_seconds, given.write_seconds, given.detect,
              given.restart) for gpus in sizes
    ]  # fmt: skip
    expected = sum(given.runs * given.days * DAY / (of.between + of.detect + of.restart) for of in costs)
    if expected > MAX_FAILURES:
        raise UserError(f"--runs {given.runs}: makes {expected:,.0f} failures; use fewer than {MAX_FAILURES:,}")
    return sizes, costs, [_interval(given, of) for of in costs]


def _interval(given: argparse.Namespace, of: Costs) -> float:
    if given.interval == "auto":
        if of.save == 0 and of.write == 0:
            raise UserError("--interval auto: saves that cost nothing have no best interval; give seconds")
        return daly(of)
    try:
        interval = float(given.interval)
    except ValueError:
        interval = inf
    if not 0 < interval <= MAX_SECONDS:
        raise UserError(f"--interval {printable(given.interval)}: must be auto, or seconds up to {MAX_SECONDS:g}")
    if interval < of.write:
        raise UserError(
            f"--interval {interval:g}: must be at least --write-seconds = {of.write:g}: a save waits for the one before"
        )
    return interval


def _simulated_text(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    lines = [
        (
            f"{told['gpus']:,}",
            f"{told['hours_between_failures']:.3g} h",
            lasting(told["interval"]),
            f"{told['goodput']:.2%} ± {told['error']:.2%}",
            f"{told['runs_between'][0]:.1%} – {told['runs_between'][1]:.1%}",
            f"{told['exact']:.2%}",
            f"{told['approximation']:.2%}",
            lasting(told["young"]),
            lasting(told["daly"]),
            f"{told['failures']:.1f}",
        )
        for told in rows
    ]
    header = (
        "GPUs",
        "failure every",
        "save every",
        "goodput",
        "runs",
        "closed form",
        "first order",
        "Young",
        "Daly",
        "failures",
    )
    about = f"{given.runs} runs of {given.days:g} days; ±: 95 % interval of the mean; runs: 90 % of them are between"
    return f"{table(header, lines, ())}\n\n{about}"
