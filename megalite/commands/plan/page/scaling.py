"""Charts over numbers of GPUs: strong and weak scaling, and the front of time and cost."""

from collections.abc import Sequence

from megalite.base.errors import counted
from megalite.commands.plan.gpu_counts import Point, scaling
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import layout_text, pareto, run_unit
from megalite.cost.layout_choice import choice_of
from megalite.cost.predict import Prediction
from megalite.cost.whole_run import run_of
from megalite.layout_search.search import Result
from megalite_launch.base.texts import scaled, seconds_text, time_unit
from megalite_launch.page.html import columns, paragraph, section, table
from megalite_launch.page.lines import Axis, Line, line_chart

BEST_LABEL, SAME_LABEL = "the fastest layout", "this layout with more data-parallel ranks"


def scaling_charts(asked: Asked, prediction: Prediction, fastest: Prediction | None) -> str:
    """Draw half to eight times the GPUs, with the same batch and with a growing one. fastest: see `scaling`."""
    told = (
        "Half to eight times the GPUs. Ideal is to halve the time of a step with twice the GPUs (strong scaling), or "
        "to keep it where the batch grows with them (weak scaling). A number of GPUs is left out where no layout fits."
    )
    charts = []
    for grows in (False, True):
        points = scaling(asked, prediction, fastest, grows)
        name = "Weak scaling: the batch grows" if grows else "Strong scaling: the same batch"
        charts.append(f"<h3>{name}</h3>{_chart(name, points, prediction, grows)}{_table(points, prediction, grows)}")
    return section("Scaling", paragraph(told, "pale"), columns(*charts))


def _chart(name: str, points: Sequence[Point], base: Prediction, grows: bool) -> str:
    counts = [point.gpus for point in points]
    size, unit = time_unit(base.seconds)
    ideal = [(float(gpus), base.seconds / size * (1 if grows else base.gpus / gpus)) for gpus in counts]
    lines = [Line("ideal", ideal, ideal=True)]
    for number, (label, found) in enumerate(
        ((SAME_LABEL, [p.same for p in points]), (BEST_LABEL, [p.best for p in points]))
    ):
        drawn = [(float(gpus), of.seconds / size) for gpus, of in zip(counts, found, strict=True) if of]
        if len(drawn) > 1 or label == SAME_LABEL:
            lines.append(Line(label, drawn, 1 - number))
    return line_chart(name, _gpus(counts), Axis(f"a step, {unit}", _plain, logarithmic=not grows), lines)


def _table(points: Sequence[Point], base: Prediction, grows: bool) -> str:
    rows = []
    for point in points:
        alike = point.best and point.same and point.best.config == point.same.config
        for found, words in ((point.best, ""), (None if alike else point.same, "same layout: ")):
            if found is None:
                continue
            rows.append(
                [
                    f"{point.gpus:,}",
                    f"{point.batch:,}",
                    seconds_text(found.seconds),
                    f"{found.tokens_per_second / base.tokens_per_second:.0%}",
                    words + layout_text(choice_of(found.config)),
                ]
            )
    return table(["GPUs", "batch", "step", "efficiency", "layout"], rows, (4,))


def front_chart(asked: Asked, best: Sequence[tuple[int, Result]]) -> str:
    """Time against cost where the run's tokens are known; the time of a step by number of GPUs."""
    counts = [gpus for gpus, _ in best]
    first = best[0][1].prediction
    size, unit = time_unit(first.seconds)
    ideal = [(float(gpus), first.seconds / size * first.gpus / gpus) for gpus in counts]
    steps = [(float(gpus), result.seconds / size) for gpus, result in best]
    name = "Time of a step by number of GPUs"
    lines = [Line("ideal", ideal, ideal=True), Line(BEST_LABEL, steps)]
    axis = Axis(f"a step, {unit}", _plain, logarithmic=True)
    charts = [f"<h3>{name}</h3>{line_chart(name, _gpus(counts), axis, lines)}"]
    if asked.tokens:
        charts.append(_costs(asked.tokens, best))
    return section("By number of GPUs", columns(*charts))


def _costs(tokens: float, best: Sequence[tuple[int, Result]]) -> str:
    runs = [run_of(result.prediction, tokens) for _, result in best]
    on_front = pareto(runs)
    size, unit = run_unit(runs)
    kept: list[tuple[float, float, str]] = []
    beaten: list[tuple[float, float, str]] = []
    for (gpus, _), run, optimal in zip(best, runs, on_front, strict=True):
        (kept if optimal else beaten).append((run.seconds / size, run.cost, counted(gpus, "GPU")))
    lines = [
        Line(told, [(length, cost) for length, cost, _ in each], colour, [label for *_, label in each])
        for told, colour, each in (
            ("no other is both faster and cheaper", 0, sorted(kept)),
            ("beaten in both", 6, sorted(beaten)),
        )
        if each
    ]
    name = "Time against cost of the whole run"
    chart = line_chart(name, Axis(unit, _plain, logarithmic=True), Axis("US dollars", _dollars), lines)
    return f"<h3>{name}</h3>{chart}"


def _gpus(counts: Sequence[int]) -> Axis:
    return Axis("GPUs", lambda gpus: f"{gpus:,.0f}", logarithmic=True, marks=[float(count) for count in counts])


def _dollars(value: float) -> str:
    return f"${scaled(value, '').strip()}" if value else "$0"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
