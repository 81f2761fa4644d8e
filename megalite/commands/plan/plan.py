"""`megalite plan`: the fastest layouts of a model on a cluster, without torch, a GPU or a launcher."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from megalite.base.errors import InputError, counted, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_writable, exists, write_new
from megalite.base.late_import import import_for_good
from megalite.base.terminal import console, sections
from megalite.commands.plan.compare import comparison
from megalite.commands.plan.explain import explained
from megalite.commands.plan.global_batch import batch_text
from megalite.commands.plan.near_ties import told_alike
from megalite.commands.plan.no_layout import nothing_fits
from megalite.commands.plan.options import is_front, refuse_unread
from megalite.commands.plan.request import Asked, as_is, as_overrides, ask
from megalite.commands.plan.search_order import best_order
from megalite.commands.plan.tables import LISTED_ROWS, fits_text, front, layout_text, outside, ranking, routing_text
from megalite.config.load import dump
from megalite.config.rules.parallel import SCHEDULE_FILES
from megalite.cost.layout_choice import choice_of
from megalite.cost.predict import Prediction
from megalite.cost.texts import money, step_text
from megalite.cost.whole_run import run_of
from megalite.layout_search.search import Found, Result
from megalite.schedule.file import write as write_order
from megalite.schedule.generate import AUTO_SCHEDULE
from megalite_launch.base.texts import memory_text, seconds_text

Parts = list[tuple[str, RenderableType]]
_NO_GPU_COUNT = "No number of GPUs here keeps the limits."


def run(args: argparse.Namespace) -> int:
    """Prints a ranked table, an explanation, a comparison or a front; writes what was asked for.

    args: those of `megalite plan`. Raises InputError for a bad question, and where no layout fits.
    """
    refuse_unread(args)
    files = (
        ("--write", args.write, SCHEDULE_FILES),
        ("--schedule", args.schedule, SCHEDULE_FILES),
        ("--html", args.html, (".html",)),
    )
    for option, path, ends in files:
        _check_file(option, path, ends)
    if args.write is not None and args.write == args.schedule:
        raise InputError(f"--write and --schedule: cannot both be {args.write}; give one of them another name")
    if args.dry_run:
        return _self_check(args)
    if args.compare:
        parts = _compared(args)
    elif args.as_is:
        parts = _own_layout(args)
    elif is_front(args):
        parts = _front(args)
    else:
        parts = _ranked(args)
    sections(console(), parts)
    return ExitCode.DONE


def _self_check(args: argparse.Namespace) -> int:
    """Compare predictions of the fastest layout, or of the configuration's own, with dry runs of the real code."""
    overrides, gpus = list(args.overrides), None if args.as_is and args.gpus is None else _one_count(args)
    if not args.as_is:
        asked = ask(args)
        found = asked.search(_one_count(args), 1)
        if not found.results:
            raise InputError(nothing_fits(asked, _one_count(args), found))
        best = found.results[0]
        overrides += as_overrides(best.prediction.config)
        if args.cluster is not None:
            overrides.append(f"run.cluster={json.dumps(args.cluster)}")
        sections(
            console(), [(_heading(asked, _one_count(args)), Text(f"The fastest layout: {layout_text(best.choice)}"))]
        )
    given = argparse.Namespace(files=args.files, overrides=overrides, world_size=gpus)
    code: int = import_for_good("megalite.commands.selfcheck").run(given)
    return code


def _check_file(option: str, path: str | None, ends: tuple[str, ...]) -> None:
    if path is None:
        return
    if not path.endswith(ends):
        raise InputError(f"{option} {path}: must end in {ends[0]}; CONFIG goes before {option}")
    if exists(path):
        raise InputError(f"{option} {path}: there is such a file already; give another name")
    check_writable(Path(path))


def _ranked(args: argparse.Namespace) -> Parts:
    asked, gpus = ask(args), _one_count(args)
    planning, wanted = f"Planning for {counted(gpus, 'GPU')} ...", max(args.top or LISTED_ROWS, args.pick or 1)
    with Console(stderr=True).status(planning) as status:
        found = asked.search(
            gpus, wanted, args.exhaustive, lambda so_far: status.update(f"{planning} {_progress(so_far, wanted, args)}")
        )
    if not found.results:
        raise InputError(nothing_fits(asked, gpus, found))
    prediction = _picked(args, found)
    heading, told = _heading(asked, gpus), _told(asked, found)
    parts: Parts = [*_batch(asked), (heading, ranking(asked, found))]
    if choice := told_alike(found.results, len(found.results) == wanted):
        parts.append(("Which one?", Text(choice)))
    apart = outside(asked, found)
    parts += [(title, Text(text)) for title, text in apart]
    parts += [*_routing(asked), ("How it was found", Text(told))]
    if args.explain:
        parts += explained(asked, prediction.config, *asked.predict(prediction.config))
    if args.schedule:
        prediction = _with_order(args, asked, prediction, parts)
    _write(args, asked, prediction)
    if args.write:
        parts.append(("What was written", Text(f"{args.write}: row {args.pick or 1}")))
    told = " ".join(text for text in (choice, *(text for _, text in apart), told) if text)
    _save(
        args,
        lambda page: page.ranked_page(
            asked, args.given, heading, found, told, prediction, row=args.pick, searched=True
        ),
    )
    return parts


def _batch(asked: Asked) -> Parts:
    """Explain the batch, if nobody has given it."""
    if asked.batch == "given":
        return []
    config, tokens = asked.config, asked.tokens if asked.batch == "by tokens" else None
    return [("The batch", Text(batch_text(config.batch.global_, tokens, config.model.sequence_length)))]


def _routing(asked: Asked) -> Parts:
    """Tell how experts are taken to be chosen, if there are any."""
    return [("Routing", Text(told))] if (told := routing_text(asked)) else []


def _picked(args: argparse.Namespace, found: Found) -> Prediction:
    """The layout that --pick names by its row; the fastest without it."""
    row = args.pick or 1
    if row > len(found.results):
        there = counted(len(found.results), "layout")
        raise InputError(f"--pick {row}: there is no such row, as only {there} can run and fit; use one of their rows")
    return found.results[row - 1].prediction


def _progress(found: Found, wanted: int, args: argparse.Namespace) -> str:
    """Describe how far a search is that may take minutes."""
    of = "" if args.exhaustive else f" of {wanted:,}"
    return f"{len(found.results):,}{of} found, {counted(found.timed, 'layout')} simulated"


def _own_layout(args: argparse.Namespace) -> Parts:
    asked = ask(args, searches=False)
    config = as_is(asked, None if args.gpus is None else _one_count(args))
    prediction, needed = asked.predict(config)
    heading, found = _heading(asked, prediction.gpus), Found([Result(choice_of(config), prediction, needed.total)])
    fits = fits_text(needed.total, asked.limit)
    parts: Parts = [*_batch(asked), (heading, ranking(asked, found)), ("Does it fit?", fits), *_routing(asked)]
    apart = outside(asked, found)
    parts += [(title, Text(text)) for title, text in apart]
    if args.explain or needed.total > asked.limit:
        parts += explained(asked, config, prediction, needed)
    if args.schedule:
        prediction = _with_order(args, asked, prediction, parts)
    _write(args, asked, prediction)
    told = " ".join([f"It {fits}.", *(text for _, text in apart)])
    _save(args, lambda page: page.ranked_page(asked, args.given, heading, found, told, prediction, searched=False))
    return parts


def _with_order(args: argparse.Namespace, asked: Asked, before: Prediction, parts: Parts) -> Prediction:
    """Save the fastest order of a layout's pipeline. Returns the layout with it, or as it was if it has it already."""
    with Console(stderr=True).status("Searching an order for the pipeline ..."):
        order = best_order(asked, before.config)
    write_new(Path(args.schedule), write_order(order.table))
    after, needed = asked.predict(order.of(args.schedule))
    own = _schedule_text(before.config.parallel.pipeline.schedule, before.config.parallel.pipeline.stages_per_rank)
    named = _schedule_text(order.name, order.stages_per_rank)
    told = f"{args.schedule}: {step_text(after)} a step, with {memory_text(needed.total)}"
    if order.is_own:
        told += f". It is the order of {own}, as none that was searched is faster; --write keeps that name."
    else:
        told += f", {order.seconds / order.own - 1:+.1%} against {own}."
        if order.name != AUTO_SCHEDULE:
            told += f" It is the order of {named}, as none that was searched is faster."
    if order.own_memory > asked.limit:
        told += f" {own} would need {memory_text(order.own_memory)}, which is too much."
    parts.append(("Order searched for these very stages", Text(told)))
    return before if order.is_own else after


def _schedule_text(name: str, stages: int) -> str:
    return f"{name} v {stages}" if name == "interleaved_1f1b" else name


def _compared(args: argparse.Namespace) -> Parts:
    if len(args.files) < 2:
        raise InputError("--compare: needs at least two configurations, as in megalite plan --compare A.yaml B.yaml")
    given = None if args.gpus is None else _one_count(args)
    asked = [ask(args, [file], searches=False) for file in args.files]
    configs = [as_is(each, given) for each in asked]
    pairs = [one.predict(config) for one, config in zip(asked, configs, strict=True)]
    _save(args, lambda page: page.compared_page(asked, args.given, args.files, pairs))
    untold = next((each for each in asked if each.batch != "given"), None)
    with_experts = next((each for each in asked if each.config.model.experts), asked[0])
    return [*([] if untold is None else _batch(untold)), *comparison(asked, args.files, pairs), *_routing(with_experts)]


def _front(args: argparse.Namespace) -> Parts:
    asked, best = ask(args), []
    counts = args.gpus
    with Console(stderr=True).status("Planning ...") as status:
        for gpus in counts:
            status.update(f"Planning for {counted(gpus, 'GPU')} ...")
            if results := asked.search(gpus, 1).results:
                best.append((gpus, results[0]))
    if not best:
        raise InputError(nothing_fits(asked, counts[-1], asked.search(counts[-1], 1)))
    heading, advice = f"{_model(asked)}, by number of {asked.cluster.gpu.name}", ""
    parts: Parts = [*_batch(asked), (heading, front(asked, best)), *_routing(asked)]
    if asked.tokens:
        advice = _advice(asked, best)
        parts.append(("Which one?", Text(advice)))
    if len(best) < len(counts):
        left_out = listing([f"{gpus:,}" for gpus in counts if gpus not in dict(best)], "and")
        without = f"On {left_out} GPUs no layout is possible and fits; --gpus with one of these numbers tells why."
        parts.append(("What is left out", Text(without)))
        advice = f"{advice} {without}".lstrip()
    kept = _within(asked, best)
    if args.write and not kept and (asked.days or asked.budget):
        raise InputError(
            f"--write {args.write}: {_NO_GPU_COUNT} Nothing is saved; raise --days or --budget, or leave them out"
        )
    gpus, chosen = (kept or best)[0]
    _write(args, asked, chosen.prediction)
    if args.write:
        parts.append(("What was written", Text(f"{args.write}: the layout for {counted(gpus, 'GPU')}")))
    _save(args, lambda page: page.front_page(asked, args.given, heading, best, chosen, advice))
    return parts


def _within(asked: Asked, best: list[tuple[int, Result]]) -> list[tuple[int, Result]]:
    """Select the layouts that keep the limits of days and budget, the cheapest first."""
    if asked.tokens is None:
        return []
    runs = [(run_of(result.prediction, asked.tokens), gpus, result) for gpus, result in best]
    kept = [
        (run.cost, gpus, result)
        for run, gpus, result in runs
        if (asked.days is None or run.days <= asked.days) and (asked.budget is None or run.cost <= asked.budget)
    ]
    return [(gpus, result) for _, gpus, result in sorted(kept, key=lambda entry: entry[:2])]


def _advice(asked: Asked, best: list[tuple[int, Result]]) -> str:
    kept = _within(asked, best)
    if asked.days is None and asked.budget is None:
        return (
            "* marks numbers of GPUs that no other beats in both time and cost. --days and --budget choose among them."
        )
    if not kept:
        return _NO_GPU_COUNT
    gpus, result = kept[0]
    assert asked.tokens is not None
    run = run_of(result.prediction, asked.tokens)
    told = (
        f"The cheapest that keeps the limits: {counted(gpus, 'GPU')}, {seconds_text(run.seconds)}, {money(run.cost)}."
    )
    most = 1 + result.prediction.spread
    passed = (asked.days is not None and most * run.days > asked.days) or (
        asked.budget is not None and most * run.cost > asked.budget
    )
    return f"{told} The interval of its prediction passes a limit." if passed else told


def _one_count(args: argparse.Namespace) -> int:
    if args.gpus is None:
        raise InputError("--gpus: is needed for a search: a number of GPUs, as in --gpus 64, or a range, as in 8-512")
    if len(args.gpus) > 1:
        raise InputError("--gpus: must be one number here, not several or a range")
    count: int = args.gpus[0]
    return count


def _model(asked: Asked) -> str:
    model, batch = asked.config.model, asked.config.batch
    return (
        f"{counted(model.layers, 'layer')} of width {model.width:,}, {counted(batch.global_, 'sequence')} of "
        f"{model.sequence_length:,} tokens a step"
    )


def _heading(asked: Asked, gpus: int) -> str:
    return f"{_model(asked)}, on {gpus:,} × {asked.cluster.gpu.name} ({asked.cluster.name})"


def _told(asked: Asked, found: Found) -> str:
    spread = asked.timer.constants.spread
    return (
        f"{counted(found.layouts, 'layout')} had a bound, {found.timed:,} were simulated, the memory of "
        f"{found.walked:,} was walked through. Tensors may take {memory_text(asked.limit)} of a GPU. "
        f"Intervals are ±{spread:.0%}; docs/planner_evidence.md tells how predictions compare with published runs."
    )


def _write(args: argparse.Namespace, asked: Asked, prediction: Prediction) -> None:
    """Write the chosen layout as a configuration."""
    if args.write is None:
        return
    run = prediction.config.run
    cluster = run.cluster if args.cluster is None else args.cluster
    config = replace(prediction.config, run=replace(run, device=asked.device, cluster=cluster))
    header = (
        f"# {layout_text(choice_of(prediction.config))}, planned for {prediction.gpus} × {asked.cluster.name}:\n"
        f"# {seconds_text(prediction.seconds)} a step, {prediction.tokens_per_second:,.0f} tokens/s/GPU\n"
    )
    write_new(Path(args.write), header + dump(config))


def _save(args: argparse.Namespace, made: Callable[[Any], str]) -> None:
    """Write the page if one was asked for; only then is it made, and its module imported."""
    if args.html is not None:
        with Console(stderr=True).status("Drawing, and planning for other numbers of GPUs ..."):
            write_new(Path(args.html), made(import_for_good("megalite.commands.plan.page.page")))
