"""Predicts what a budget buys, by the laws of a ladder: model, tokens, batch, rate, layout, and the loss to expect."""

import argparse
import sys
from pathlib import Path

from rich.text import Text

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, printable
from megalite.base.files import check_output, exists, write_new
from megalite.base.terminal import console, sections, table
from megalite.commands.plan.amounts import DEFAULT_CLUSTER, amount, gpu_counts
from megalite.commands.plan.tables import layout_text
from megalite.config.load import dump
from megalite.config.rules.parallel import SCHEDULE_FILES
from megalite.cost.cluster import load_cluster
from megalite.cost.layout_choice import choice_of
from megalite.cost.texts import money, step_text
from megalite.scaling.budget import Bought, ClusterGpus, buy
from megalite.scaling.settings import read_settings
from megalite.scaling.show import amount_text, interval_text, significant
from megalite.scaling.stored import Stored, read_fit
from megalite.scaling.table import read_results
from megalite_launch.base.arguments import above_zero

COMMAND = "megalite-predict"


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _main(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "experiment", type=Path, metavar="EXP", help="folder of a ladder that megalite-sweep has fitted"
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--flops",
        type=above_zero(most=1e40),
        metavar="C",
        help="budget as 6·N·D, as in 1e21",
    )
    budget.add_argument("--gpu-hours", type=amount, metavar="H", help="budget on the cluster, as in 20k")
    parser.add_argument("--rates", type=Path, metavar="EXP", help="folder of a fitted sweep: laws of rate and batch")
    parser.add_argument("--cluster", metavar="NAME", help=f"cluster, as of megalite plan (default: {DEFAULT_CLUSTER})")
    parser.add_argument("--gpus", type=gpu_counts, metavar="N", help="number of GPUs, for which a layout is planned")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the run's configuration to this YAML file")
    return parser


def _main(options: argparse.Namespace) -> None:
    if options.gpus is not None and len(options.gpus) > 1:
        raise InputError("--gpus: must be one number here, not a range")
    if options.cluster is not None and options.gpus is None:
        raise InputError("--cluster: is read with --gpus only; add --gpus, or leave it out")
    if options.gpu_hours is not None and options.gpus is None:
        raise InputError("--gpu-hours: needs --gpus, and --cluster if it is another one than the usual")
    if options.write is not None:
        _check_file(options.write)
    machine = (
        None if options.gpus is None else ClusterGpus(load_cluster(options.cluster or DEFAULT_CLUSTER), options.gpus[0])
    )
    stored = _stored(options.experiment)
    rates = None if options.rates is None else _stored(options.rates)
    results = read_results(options.experiment / "results.csv")
    bought = buy(stored, results, rates, flops=options.flops, gpu_hours=options.gpu_hours, machine=machine)
    _show(stored, bought, machine)
    if options.write is not None:
        write_new(options.write, f"{_header(stored, bought)}{dump(bought.config)}")


def _stored(folder: Path) -> Stored:
    settings = read_settings(folder)
    fit = read_fit(folder, settings)
    if not fit:
        raise InputError(f"{folder / 'fit.json'}: is missing; megalite-sweep fit writes it")
    return Stored(folder, settings, fit)


def _check_file(path: Path) -> None:
    if not str(path).endswith(SCHEDULE_FILES):
        raise InputError(f"--write {path}: must end in {SCHEDULE_FILES[0]}")
    if exists(path):
        raise InputError(f"--write {path}: there is such a file already; give another name")
    check_output(path)


def _header(stored: Stored, bought: Bought) -> str:
    loss = interval_text(bought.loss.plain())
    return (
        printable(
            f"# {amount_text(bought.size)} parameters ({stored.settings.parameters}), "
            f"{amount_text(bought.tokens)} tokens, {bought.flops:.3g} FLOPs;"
        )
        + printable(f" predicted loss {loss}, {bought.times['flops']:.3g} times the largest fitted budget")
        + "\n"
    )


def _show(stored: Stored, bought: Bought, machine: ClusterGpus | None) -> None:
    config, model = bought.config, bought.config.model
    made = table("", "value", text=("", "value"))
    made.add_row("budget", f"{bought.flops:.4g} FLOPs (6·N·D), {bought.times['flops']:.3g} × the largest fitted")
    made.add_row(
        "best N", f"{interval_text(bought.best[0].plain(), amount_text)}, N counted {stored.settings.parameters}"
    )
    made.add_row("best D", interval_text(bought.best[1].plain(), amount_text))
    heads = f"{model.heads} heads, {model.kv_heads} of keys, MLP {model.ffn:,}"
    shape = f"{model.layers} layers of width {model.width:,}, {heads}"
    made.add_row("model", f"{amount_text(bought.size)}: {shape}; {bought.times['parameters']:.3g} × the largest fitted")
    batch = config.batch.global_ * model.sequence_length
    made.add_row("tokens", f"{amount_text(bought.tokens)}; {bought.times['tokens']:.3g} × the most fitted")
    made.add_row(
        "training", f"{config.train.steps:,} steps of {config.batch.global_:,} sequences, {amount_text(batch)} tokens"
    )
    made.add_row("rate", significant(config.optim.lr))
    made.add_row(
        "loss", f"{interval_text(bought.loss.plain())}, {stored.fit['settings']['interval']:.0%} interval of the law"
    )
    if bought.layout is not None and bought.run is not None and machine is not None:
        run, prediction = bought.run, bought.layout.prediction
        made.add_row(
            "layout", f"{layout_text(choice_of(prediction.config))} on {machine.gpus:,} × {machine.cluster.gpu.name}"
        )
        made.add_row("a step", f"{step_text(prediction)}, {prediction.tokens_per_second:,.0f} tokens/s/GPU")
        made.add_row("run", f"{run.days:,.2f} days, {run.gpu_hours:,.1f} GPU-hours, {money(run.cost)}")
    shown = [("What the budget buys", made)]
    told = [*bought.told, *stored.fit["caveats"]]
    on = console()
    sections(on, [*shown, *([("Mind", Text("\n".join(f"• {printable(each)}" for each in told)))] if told else [])])


if __name__ == "__main__":
    sys.exit(main())
