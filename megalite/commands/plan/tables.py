"""Predictions as tables for people."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from megalite.base.terminal import table
from megalite.commands.plan.request import Asked
from megalite.config.parallel_schema import SCHEDULES
from megalite.cost.layout_choice import Choice
from megalite.cost.program import NATURAL_LOAD
from megalite.cost.state_files import files_text
from megalite.cost.texts import money, step_text
from megalite.cost.whole_run import DAY, WholeRun, goodput, run_of
from megalite.layout_search.search import Found, Result, fullest_rank
from megalite.plan.memory.held import HOST_MEMORY
from megalite_launch.base.texts import memory_text, rounded, scaled, time_unit

LISTED_ROWS = 5  # rows, where --top does not tell


def layout_text(choice: Choice) -> str:
    """A layout in words: `tp 8 · pp 16 interleaved_1f1b v 4 · dp 128 zero1 · micro 1 · selective`.

    Layers of stages are shown where they are not those of the default split.
    """
    parts = []
    if choice.tp > 1:
        parts.append(f"tp {choice.tp}")
    if choice.cp > 1:
        parts.append(f"cp {choice.cp} {choice.method}")
    if choice.pp > 1:
        virtual = choice.virtual or SCHEDULES.get(choice.schedule, 1)
        stages = f" v {virtual}" if choice.schedule == "interleaved_1f1b" or (choice.virtual or 1) > 1 else ""
        layers = f" layers {split_text(choice.split)}" if choice.split else ""
        parts.append(f"pp {choice.pp} {choice.schedule}{stages}{layers}")
    replicas = f"{choice.replicas} × " if choice.replicas > 1 else ""
    if choice.replicas * choice.shards > 1:
        parts.append(f"dp {replicas}{choice.shards} {choice.mode}")
    elif choice.cp > 1:  # these ranks share states, too
        parts.append(choice.mode)
    if choice.ep > 1:
        parts.append(f"ep {choice.ep}")
    parts.append(f"micro {choice.micro}")
    if choice.recompute != "none":
        parts.append(f"recompute {choice.recompute}")
    parts += ["activations on host"] * choice.offload_activations
    parts += ["optimizer on host"] * (choice.place == "host") + ["states in files"] * (choice.place == "files")
    return " · ".join(parts)


def split_text(split: Sequence[int]) -> str:
    """The layers of every stage, equal neighbours at once: `7 9×2 7`."""
    runs = ((layers, len(list(stages))) for layers, stages in groupby(split))
    return " ".join(f"{layers}×{stages}" if stages > 1 else f"{layers}" for layers, stages in runs)


def ranking(asked: Asked, found: Found) -> Table:
    """The layouts that a search found, the fastest first."""
    columns = ["", "layout", "step", "tokens/s/GPU", "MFU", "MFU full", "memory", "bubble", "exposed", "tokens/day"]
    runs = [run_of(result.prediction, asked.tokens) for result in found.results] if asked.tokens else []
    size, unit = run_unit(runs)
    run = [unit, "GPU-hours", "cost", "energy"] if runs else []
    shown = table(*columns, *run, text=("layout",))
    for at, result in enumerate(found.results):
        of = result.prediction
        share, _ = goodput(of)
        cells = [
            str(at + 1),
            layout_text(result.choice),
            step_text(of),
            f"{of.tokens_per_second:,.0f}",
            f"{of.mfu:.1%}",
            f"{of.mfu_full:.1%}",
            memory_text(result.memory),
            f"{of.bubble:.1%}",
            f"{of.exposed:.1%}",
            scaled(of.tokens_per_second * of.gpus * DAY * share, ""),
        ]
        shown.add_row(*cells, *(_run_cells(runs[at], size, asked.timer.constants.spread) if runs else []))
    return shown


def routing_text(asked: Asked) -> str:
    """Describe how experts are taken to be chosen; "" for a model without any."""
    if asked.config.model.experts is None:
        return ""
    if asked.config.model.experts.force_balance:
        return "Experts are chosen equally often, by model.experts.force_balance: tokens take them in turn."
    if asked.routing == "balanced":
        return "Experts are taken to be chosen equally often; --routing natural takes what nothing balances."
    return (
        "Experts are taken to be chosen unequally (--routing natural): the busiest of the ranks that share them out "
        f"has {NATURAL_LOAD:g} times the mean rows, and others wait for it. Memory is that of equal choices."
    )


def outside(asked: Asked, found: Found) -> list[tuple[str, str]]:
    """Headings and texts on what layouts of the first rows keep in host memory, and the first of them in files."""
    on_hosts, in_files = list[str](), ""
    for row, result in enumerate(found.results[:LISTED_ROWS], 1):
        config = result.prediction.config
        if not result.choice.offload_activations and result.choice.place == "device":
            continue
        fullest = fullest_rank(config, asked.timer)
        if held := sum(fullest.of(HOST_MEMORY).values()):
            ranks = min(asked.cluster.gpus_per_node, result.prediction.gpus)
            on_hosts.append(f"row {row} keeps {memory_text(held)} for a rank, {memory_text(held * ranks)} on a node")
        if not in_files and (told := files_text(config, [fullest], asked.cluster)):
            in_files = f"Row {row}: {told}"
    advice = "The memory of hosts is not in cluster files: see that yours have it."
    texts = [("Host memory", f"There, {'; '.join(on_hosts)}. {advice}")] * bool(on_hosts)
    return texts + [("Optimizer states in files", in_files)] * bool(in_files)


def run_unit(runs: Iterable[WholeRun]) -> tuple[float, str]:
    """The unit in which the longest of some runs is told: its seconds, and its name."""
    size, name = time_unit(max((run.seconds for run in runs), default=DAY))
    return (1.0, "seconds") if size <= 1 else (size, name)


def _run_cells(run: WholeRun, size: float, spread: float) -> list[str]:
    """Time and cost, each with its interval, GPU-hours and energy. spread: half the interval's width, relative."""
    time, cost = run.seconds / size, run.cost
    return [
        f"{rounded(time)} ({rounded(time / (1 + spread))} – {rounded(time * (1 + spread))})",
        rounded(run.gpu_hours),
        f"{money(cost)} ({money(cost / (1 + spread))} – {money(cost * (1 + spread))})",
        scaled(run.energy, "Wh"),
    ]


def front(asked: Asked, best: Sequence[tuple[int, Result]]) -> Table:
    """Tabulate by number of GPUs the fastest layout and what a run takes. `*` marks rows that nothing beats in both."""
    columns = ["GPUs", "layout", "step", "tokens/s/GPU", "MFU", "memory", "goodput"]
    runs = [run_of(result.prediction, asked.tokens or 1e9) for _, result in best]
    size, unit = run_unit(runs)
    run = [unit, "GPU-hours", "cost", "energy", "front"] if asked.tokens else ["speed-up", "efficiency"]
    shown = table(*columns, *run, text=("layout", "front"))
    first = best[0][1].prediction
    for (gpus, result), whole, on_front in zip(best, runs, pareto(runs), strict=True):
        of = result.prediction
        cells = [
            f"{gpus:,}",
            layout_text(result.choice),
            step_text(of),
            f"{of.tokens_per_second:,.0f}",
            f"{of.mfu:.1%}",
            memory_text(result.memory),
            f"{goodput(of)[0]:.1%}",
        ]
        if asked.tokens:
            run_cells = _run_cells(whole, size, asked.timer.constants.spread)
            cells += [*run_cells, "*" * on_front + _limits(asked, whole)]
        else:
            faster = first.seconds / of.seconds
            cells += [f"{faster:.2f}×", f"{faster * first.gpus / gpus:.0%}"]
        shown.add_row(*cells)
    return shown


def _limits(asked: Asked, run: WholeRun) -> str:
    """Name the limits that a run breaks."""
    late = asked.days is not None and run.days > asked.days
    dear = asked.budget is not None and run.cost > asked.budget
    return " too late" * late + " too expensive" * dear


def pareto(runs: Sequence[WholeRun]) -> list[bool]:
    """Return for each run whether no other takes less time and no more money, or less money and no more time."""
    return [
        not any(
            other.seconds <= run.seconds
            and other.cost <= run.cost
            and (other.seconds < run.seconds or other.cost < run.cost)
            for other in runs
        )
        for run in runs
    ]


def fits_text(needed: float, limit: float) -> Text:
    """Say whether bytes fit, with both numbers."""
    if needed <= limit:
        return Text(f"fits: {memory_text(needed)} of {memory_text(limit)} for tensors", style="green")
    over = f"{memory_text(needed - limit)} more than the {memory_text(limit)} for tensors"
    return Text(f"does not fit: {memory_text(needed)}, {over}", style="bold red")
