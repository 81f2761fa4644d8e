"""The runs that a fit uses, as arrays, and those that it leaves out, each with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from megalite.base.errors import InputError, counted, listing
from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS
from megalite.scaling.settings import DEFINITIONS, Settings
from megalite.scaling.table import Results, RunResult

SIZE_TOLERANCE = 1e-6  # relative: parameters or tokens that differ by less are the same


@dataclass(frozen=True)
class Points:
    """n runs. size: parameters by definition, `[n]` each. tokens, losses: `[n]`. which: the name of the loss."""

    runs: tuple[RunResult, ...]
    size: dict[str, Array]
    tokens: Array
    losses: Array
    which: str

    def __len__(self) -> int:
        return len(self.runs)

    def flops(self, definition: str) -> Array:
        """6·N·D."""
        return FLOPS * self.size[definition] * self.tokens

    def only(self, keep: Array) -> "Points":
        """Select the points at places, or where a mask is true."""
        places = np.arange(len(self))[keep]
        size = {name: values[places] for name, values in self.size.items()}
        return Points(tuple(self.runs[at] for at in places), size, self.tokens[places], self.losses[places], self.which)


@dataclass(frozen=True)
class Chosen:
    """Sorted runs. fitted: those that fits see; undropped: the same with the highest losses, which fit.drop leaves out.

    held_out: runs of rungs that fits do not see. dropped: other finished runs, with why. caveats: sentences about the
    data. noise: the standard deviation of ln(loss) between seeds, where cells have some.
    """

    fitted: Points
    undropped: Points
    held_out: Points
    dropped: tuple[tuple[RunResult, str], ...]
    caveats: tuple[str, ...]
    noise: float | None


def choose(results: Results, settings: Settings) -> Chosen:
    """Sort the runs of a ladder. Raises InputError where none is left, or where a name to be dropped is none."""
    done, dropped, caveats = results.done(), list[tuple[RunResult, str]](), list[str]()
    which = _loss_column(done, caveats)
    kept = []
    for run in done:
        if why := _unusable(run, which, settings):
            dropped.append((run, why))
        else:
            kept.append(run)
    kept = _named_out(kept, settings, dropped)
    noise = _noise(kept, which)
    if settings.kind == "ladder":  # in a sweep, settings are what is looked at
        kept = _best_of_settings(kept, results, which, dropped, caveats)
    unknown = set(settings.holdout) - {run.rung for run in results.runs}
    if unknown:
        rungs = listing(sorted({run.rung for run in results.runs if run.rung})) or "none"
        raise InputError(f"holdout.rungs = {min(unknown)!r:.80}: is no rung of this experiment; its rungs are {rungs}")
    held = [run for run in kept if run.rung in settings.holdout]
    fitted = points_of([run for run in kept if run.rung not in settings.holdout], which)
    undropped = fitted
    if isinstance(settings.drop, int) and settings.drop:
        order = np.argsort(-fitted.losses, kind="stable")
        for at in order[: settings.drop]:
            dropped.append((fitted.runs[at], f"one of the {settings.drop} highest losses (fit.drop)"))
        fitted = fitted.only(np.sort(order[settings.drop :]))
    if not len(fitted):
        states = listing([f"{sum(run.status == s for run in results.runs)} {s}" for s in _states(results)], "and")
        why = f"; {counted(len(dropped), 'run')} left out: {dropped[0][1]}" if dropped else ""
        raise InputError(f"no finished run is left to fit; the runs are: {states or 'none'}{why}")
    if few := len(results.runs) - len(done):
        caveats.append(f"{counted(few, 'run')} of {len(results.runs)} did not finish and tell nothing here.")
    return Chosen(fitted, undropped, points_of(held, which), tuple(dropped), tuple(caveats), noise)


def points_of(runs: Sequence[RunResult], which: str) -> Points:
    size = {name: np.array([run.number(f"n_{name}") for run in runs]) for name in DEFINITIONS}
    tokens = np.array([run.number("tokens") for run in runs])
    return Points(tuple(runs), size, tokens, np.array([run.number(which) for run in runs]), which)


def without_highest(points: Points, count: int) -> Points:
    """All but the `count` highest losses."""
    return points.only(np.sort(np.argsort(-points.losses, kind="stable")[count:]))


def _states(results: Results) -> list[str]:
    return sorted({run.status for run in results.runs})


def _loss_column(done: Sequence[RunResult], caveats: list[str]) -> str:
    """The validation loss, where every finished run has one; the training loss otherwise."""
    without = [run for run in done if np.isnan(run.number("loss_valid"))]
    if not without:
        return "loss_valid"
    if any(isfinite(run.number("loss_train")) for run in without) or len(without) == len(done):
        if len(without) < len(done):
            caveats.append(
                f"{counted(len(without), 'finished run')} have no loss_valid, so the training loss of all is fitted; "
                "set eval.steps for a loss on data that was not trained on."
            )
        else:
            caveats.append("No run has loss_valid, so the training loss is fitted; set eval.steps for a better one.")
        return "loss_train"
    return "loss_valid"


def _unusable(run: RunResult, which: str, settings: Settings) -> str:
    """The reason why a finished run cannot be fitted; empty where it can."""
    loss, steps = run.number(which), run.number("steps")
    for name in ("tokens", *(f"n_{each}" for each in DEFINITIONS if each == settings.parameters)):
        if not run.number(name) >= 1:
            return f"{name} is {_shown(run.number(name))}"
    if not loss > 0:
        return f"{which} is {_shown(loss)}, which is no loss"
    if settings.min_steps and not steps >= settings.min_steps:
        return f"trained for {_shown(steps)} steps, fewer than fit.min_steps = {settings.min_steps:,}"
    return ""


def _shown(value: float) -> str:
    return "unknown" if np.isnan(value) else f"{value:,.6g}"


def _named_out(kept: list[RunResult], settings: Settings, dropped: list[tuple[RunResult, str]]) -> list[RunResult]:
    if not isinstance(settings.drop, tuple):
        return kept
    known = {name for run in kept for name in (run.id, run.slug, run.name)}
    gone = {name for run, _ in dropped for name in (run.id, run.slug, run.name)}
    for name in settings.drop:
        if name not in known | gone:
            raise InputError(f"fit.drop: {name:.80}: is the id or slug of no finished run")
    out = [run for run in kept if {run.id, run.slug, run.name} & set(settings.drop)]
    dropped += [(run, "named in fit.drop") for run in out]
    return [run for run in kept if run not in out]


def _cell(run: RunResult) -> tuple[int, int]:
    """N and D, as whole numbers that are equal where they differ by rounding alone."""
    size = next(value for value in (run.number(f"n_{name}") for name in DEFINITIONS) if value > 0)
    return round(np.log(size) / SIZE_TOLERANCE), round(np.log(run.number("tokens")) / SIZE_TOLERANCE)


def _noise(kept: Sequence[RunResult], which: str) -> float | None:
    """The standard deviation of ln(loss) among runs that differ in nothing but the seed; None if there are none."""
    alike: dict[object, list[float]] = {}
    for run in kept:
        alike.setdefault((_cell(run), tuple(sorted(run.axes.items()))), []).append(float(np.log(run.number(which))))
    repeated = [values for values in alike.values() if len(values) > 1]
    degrees = sum(len(values) - 1 for values in repeated)
    squares = sum(float(np.sum((np.array(values) - np.mean(values)) ** 2)) for values in repeated)
    return float(np.sqrt(squares / degrees)) if degrees else None


def _best_of_settings(
    kept: Sequence[RunResult], results: Results, which: str, dropped: list[tuple[RunResult, str]], caveats: list[str]
) -> list[RunResult]:
    """Keep the runs of the best setting, where runs of one size and number of tokens differ in other settings too."""
    cells: dict[tuple[int, int], dict[object, list[RunResult]]] = {}
    for run in kept:
        setting = tuple(run.axes.get(name, "") for name in results.axes)
        cells.setdefault(_cell(run), {}).setdefault(setting, []).append(run)
    out, several = set(), 0
    for settings in cells.values():
        means = {key: float(np.mean([run.number(which) for run in runs])) for key, runs in settings.items()}
        best = min(means, key=lambda key: means[key])
        several += len(settings) > 1
        for key, runs in settings.items():
            if key != best:
                out |= {run.id for run in runs}
    if several:
        caveats.append(
            f"{counted(several, 'cell')} of {len(cells)} had several settings; the one with the lowest loss counts."
        )
    dropped += [(run, "another setting of the same size and tokens has a lower loss") for run in kept if run.id in out]
    return [run for run in kept if run.id not in out]
