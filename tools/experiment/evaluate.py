"""Measure a trained model: tasks of lm-evaluation-harness, perplexity of token stores, log-probabilities of tokens."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.files import as_json, check_output, is_folder, write_whole
from megalite.base.terminal import console, sections, table
from megalite.checkpoint.store.state import State
from megalite.data.tokenizer import Tokenizer
from megalite.inference.crew import Crew
from megalite.inference.engine import Engine, check_layout
from megalite.inference.logprobs import Completion, as_line, logprobs, read_completions
from megalite.inference.perplexity import Perplexity, measure
from megalite.inference.ranks import ComputeSetup, add_options, run
from megalite.inference.record import add_record
from megalite.inference.source import Opened, open_newest, open_tokenizer, to_open
from megalite_tools.terminal import print_warning

COMMAND, MODULE = "megalite-evaluate", "megalite_tools.experiment.evaluate"
HARNESS = "megalite.inference.harness"  # imported only for tasks: it needs lm-eval

Tasks = Mapping[str, Mapping[str, Any]]


@dataclass
class Results:
    """All that was measured, for files: of each model, and of each completion."""

    models: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Runs the program, or one of its ranks. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(COMMAND, lambda: _main(arguments, _parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder, a checkpoint, or weights such as hf:FOLDER")
    parser.add_argument("--tasks", metavar="NAME,…", help="tasks of lm-eval (pip install 'megalite[eval]')")
    parser.add_argument("--task-folder", metavar="DIR", help="a folder with YAML files of further tasks")
    parser.add_argument("--fewshot", type=int, metavar="N", help="examples in every prompt (default: as tasks say)")
    parser.add_argument("--data", nargs="+", default=[], metavar="PREFIX", help="token stores, or lists of shards")
    completions = "write the log-probabilities of the completions in FILE to OUT, both JSON Lines"
    parser.add_argument("--logprobs", nargs=2, metavar=("FILE", "OUT"), help=completions)
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task and store (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--tokenizer", metavar="FILE", help="use this instead of the run's copy")
    copies = "copies of the model that share the work (default: as many as --ep needs)"
    parser.add_argument("--dp", type=int, metavar="N", help=copies)
    add_options(parser)
    return parser


def _main(arguments: list[str], options: argparse.Namespace) -> int:
    if options.tasks is None and not options.data and options.logprobs is None:
        raise InputError("give --tasks, --data or --logprobs, or several of them")
    if len(set(options.data)) < len(options.data):
        raise InputError("--data: names a token store twice")
    for name, value, least in (("--limit", options.limit, 1), ("--fewshot", options.fewshot, 0)):
        if value is not None and value < least:
            raise InputError(f"{name} {value}: must be at least {least}")
    if options.json is not None:
        check_output(options.json)
    if options.logprobs is not None:
        check_output(Path(options.logprobs[1]))
    if options.task_folder is not None and not is_folder(options.task_folder):
        raise InputError(f"--task-folder {options.task_folder}: no such folder")
    if options.tasks is not None:
        _harness()
    return run(MODULE, arguments, options, partial(_work, options))


def _harness() -> Any:
    try:
        return import_module(HARNESS)
    except ImportError as error:
        raise InputError(f"--tasks needs lm-eval: pip install 'megalite[eval]' ({error})") from None


def _work(options: argparse.Namespace, place: ComputeSetup) -> int:
    results = Results()
    for source, base in to_open(options.run, options.adapter):
        open_newest(
            source, partial(_evaluate, options, place, results), place.group, partial(print_warning, COMMAND), base
        )
    if options.json is not None and place.leads:
        write_whole(options.json, as_json({"models": results.models} if options.adapter else results.models[0]))
    if options.logprobs is not None and place.leads:
        write_whole(Path(options.logprobs[1]), "".join(json.dumps(line) + "\n" for line in results.lines))
    return ExitCode.DONE


def _evaluate(options: argparse.Namespace, place: ComputeSetup, results: Results, opened: Opened) -> None:
    """Measure one checkpoint, and add what is found to `results`. Raises DamagedError before anything is measured."""
    check_layout(opened.model, place.mesh.layout)
    tokenizer: Tokenizer | None = None
    end = opened.end_of_document
    if options.tasks is not None or options.tokenizer is not None or opened.tokenizer is not None:
        tokenizer, end = place.group.everywhere(lambda: open_tokenizer(opened, options.tokenizer))
    begin = tokenizer.begin if tokenizer is not None and opened.begins else ()
    given: list[Completion] = []
    if options.logprobs is not None:
        size, length = opened.model.vocab_size, opened.model.sequence_length
        file, wanted = options.logprobs[0], opened.wanted
        given = place.group.once(lambda: read_completions(file, tokenizer, begin, size, length, wanted))
    engine = Engine(opened.model, place.mesh, place.dtype)
    opened.fill(State({engine.stage: engine.decoder}), place.group)
    scored = logprobs(engine, place.group, given) if given else None
    data = {prefix: measure(engine, place.group, prefix, tokenizer, end, options.limit) for prefix in options.data}
    tasks: Tasks = {}
    if options.tasks is not None:
        assert tokenizer is not None
        published = tokenizer.path.parent if opened.begins and options.tokenizer is None else None
        crew = Crew(engine, place.group, tokenizer, end, opened.ends, begin)
        if not place.leads:
            crew.serve()
            return
        names = [name for name in options.tasks.split(",") if name]
        tasks = _harness().evaluate(crew, names, options.task_folder, options.limit, options.fewshot, published)
        crew.release()
    if place.leads:
        named = {"model": opened.name} if options.adapter else {}
        lines = [named | as_line(completion, values) for completion, values in zip(given, scored or (), strict=True)]
        results.lines += lines
        measured = {prefix: found for prefix, found in data.items() if found is not None}
        results.models.append(_report(opened, measured, tasks, lines))


def _report(
    opened: Opened, data: Mapping[str, Perplexity], tasks: Tasks, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Print and record the results. Returns them for JSON, but for those of completions, which have their own file."""
    parts: list[tuple[str, Any]] = []
    if data:
        parts.append((f"{opened.name}: perplexity, and quantiles of the loss of documents", _perplexities(data)))
    if tasks:
        parts.append((f"{opened.name}: tasks", _scores(tasks)))
    if lines:
        parts.append((f"{opened.name}: log-probabilities of completions, in nats", _completions(lines)))
    sections(console(), parts)
    if opened.run is not None and (data or tasks):
        try:
            add_record(opened.run, opened.step, _named(data, tasks))
        except InputError as error:
            print_warning(COMMAND, f"the run's metrics stay as they are: {error}")
    plain = {prefix: found.as_json() for prefix, found in data.items()}
    return {"model": opened.name, "step": opened.step, "data": plain, "tasks": tasks}


def _perplexities(data: Mapping[str, Perplexity]) -> Any:
    masked = any(found.untrained for found in data.values())
    counted = ("trained tokens", "of tokens") if masked else ("tokens",)
    spread = ("5 %", "50 %", "95 %")
    rows = table("store", "documents", *counted, "loss", "perplexity", "bits/byte", *spread, text=("store",))
    for prefix, found in data.items():
        size = "" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
        losses = [f"{found.document_loss[name]:.4f}" for name in ("p5", "p50", "p95")]
        counts = [found.documents, found.tokens, *([found.tokens + found.untrained] if masked else [])]
        told = (f"{count:,}" for count in counts)
        rows.add_row(printable(prefix), *told, f"{found.loss:.4f}", f"{found.perplexity:.4g}", size, *losses)
    return rows


def _completions(lines: Sequence[Mapping[str, Any]]) -> Any:
    counted = sum(value is not None for line in lines for value in line["logprobs"])
    total = sum(line["sum"] for line in lines)
    rows = table("completions", "tokens", "sum", "mean of tokens")
    rows.add_row(f"{len(lines):,}", f"{counted:,}", f"{total:.6g}", f"{total / counted:.4f}")
    return rows


def _scores(tasks: Tasks) -> Any:
    rows = table("task", "metric", "value", "±", text=("task", "metric"))
    for task, metrics in tasks.items():
        for name, value in _numbers(metrics).items():
            error = metrics.get(name.replace(",", "_stderr,", 1))
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            rows.add_row(printable(task), printable(name), f"{value:.4f}", shown)
    return rows


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values of a task's metrics, without their errors."""
    known = {name: value for name, value in metrics.items() if "," in name and "_stderr," not in name}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


def _named(data: Mapping[str, Perplexity], tasks: Tasks) -> dict[str, float]:
    """The numbers of a record, as docs/metrics.md names them."""
    found: dict[str, float] = {}
    for prefix, result in data.items():
        found |= {f"eval_loss/{prefix}": result.loss, f"eval_perplexity/{prefix}": result.perplexity}
        if result.bits_per_byte is not None:
            found[f"eval_bits_per_byte/{prefix}"] = result.bits_per_byte
    for task, metrics in tasks.items():
        found |= {f"eval/{task}/{name.removesuffix(',none')}": value for name, value in _numbers(metrics).items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
