"""The content of `fit.json`: what was fitted to which runs, with which settings, and what follows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from megalite import __version__
from megalite.base.errors import InputError
from megalite.scaling.approach1 import Fit1
from megalite.scaling.approach2 import Budget, Fit2
from megalite.scaling.approach3 import MIN_RUNS, Fit3, fit3
from megalite.scaling.bootstrap import COVERAGE, interval
from megalite.scaling.caveats import caveats
from megalite.scaling.downstream import Task, tasks
from megalite.scaling.forms import Array
from megalite.scaling.kaplan import Kaplan
from megalite.scaling.law import NAMES, Law
from megalite.scaling.methods import AnyLaw, Fitted, fit_all, plain_law
from megalite.scaling.points import Chosen, Points, choose, without_highest
from megalite.scaling.rates import ESTIMATOR, Family, Scan, in_words, scans
from megalite.scaling.settings import Settings
from megalite.scaling.table import Results

VERSION = 1
DROPS, DELTAS = (0, 1, 2, 3, 5, 10), (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
TIMES = (1, 10, 100)  # the largest fitted budget, for which predictions are made
Plain = dict[str, Any]


def record(results: Results, settings: Settings) -> Plain:
    """Everything that the finished runs of a ladder or a sweep tell. Raises InputError where that is nothing."""
    found: Plain = {"version": VERSION, "megalite": __version__, "kind": settings.kind, "name": settings.name}
    found["settings"] = asdict(settings) | {"interval": COVERAGE}
    chosen = choose(results, settings)
    scanned = scans(results, chosen.fitted.which, settings.parameters, settings.bootstrap)
    told = list(chosen.caveats)
    found["data"] = _data(chosen, settings)
    if settings.kind == "ladder":
        ladder, told = _ladder(chosen, settings)
        found |= ladder
    elif not scanned:
        raise InputError(
            "kind = sweep: no learning rate and no batch was varied with all else alike, so there is no optimum to "
            "fit; megalite-sweep report shows the runs"
        )
    found["rates"] = [_scan(each) for each in scanned]
    found["downstream"] = [_task(task) for task in tasks(chosen.fitted.runs, chosen.fitted.which)]
    found["caveats"] = told
    return found


def _ladder(chosen: Chosen, settings: Settings) -> tuple[Plain, list[str]]:
    points = chosen.fitted
    fits = {name: fit_all(points, name, settings) for name in settings.report}
    main = fits[settings.parameters][settings.method]
    if main.law is None:
        raise InputError(f"{settings.method}, N = {settings.parameters}: {main.why}")
    largest = float(points.flops(settings.parameters).max())
    lossy = _with_losses(fits[settings.parameters], settings.method)
    found: Plain = {
        "fits": {name: {m: _fitted(f, points, name) for m, f in each.items()} for name, each in fits.items()},
        "loss_samples": {} if lossy is None or lossy.drawn is None else plain_law(lossy.drawn),
        "samples": {} if main.drawn is None else plain_law(main.drawn),
        "sensitivity": _sensitivity(chosen, settings),
        "holdout": _held_out(chosen, lossy, settings),
        "holdout_method": lossy.method if lossy else None,
        "predictions": [prediction(main, lossy, times * largest, largest, len(points)) for times in TIMES],
    }
    return found, caveats(chosen, fits, settings)


def _data(chosen: Chosen, settings: Settings) -> Plain:
    points, size = chosen.fitted, chosen.fitted.size[settings.parameters]
    steps = np.array([run.number("steps") for run in points.runs])
    spans = {"parameters": size, "tokens": points.tokens, "flops": points.flops(settings.parameters)}
    return {
        "loss": points.which,
        "runs": len(points),
        "sizes": len(np.unique(np.round(np.log(size), 6))),
        "span": {name: [float(values.min()), float(values.max())] for name, values in spans.items()},
        "fewest_steps": None if np.isnan(steps).all() else int(np.nanmin(steps)),
        "seed_noise": chosen.noise,
        "used": [run.id for run in points.runs],
        "held_out": [run.id for run in chosen.held_out.runs],
        "dropped": [{"id": run.id, "slug": run.slug, "why": why} for run, why in chosen.dropped],
    }


def prediction(fitted: Fitted, lossy: Fitted | None, flops: float, largest: float, runs: int) -> Plain:
    """The best N, D and loss for a budget, each as value, low and high. times: the largest fitted budget.

    lossy: the method that tells the loss of this N and D. All methods have the same draws of runs, so those of two
    methods belong together.
    """
    assert fitted.law is not None
    size, tokens, loss = _optima(fitted.law, lossy.law if lossy else None, flops)
    drawn = [np.empty(0)] * 3
    if fitted.drawn is not None:
        drawn = _optima(fitted.drawn, lossy.drawn if lossy else None, flops)
        if lossy is not None and lossy.drawn is None:
            drawn[2] = np.empty(0)  # the loss is of another law, which has no draws
    return {
        "flops": flops,
        "times": flops / largest,
        "loss_by": lossy.method if lossy else fitted.method,
        "parameters": interval(float(size), drawn[0], runs, True).plain(),
        "tokens": interval(float(tokens), drawn[1], runs, True).plain(),
        "loss": interval(float(loss), drawn[2], runs).plain(),
    }


def _optima(law: AnyLaw, lossy: AnyLaw | None, flops: float) -> list[Array]:
    """N, D and loss. Approaches 1 and 2 know no floor of the loss, so another law tells it."""
    size, tokens = law.optimum(flops)
    loss = lossy.loss(size, tokens) if isinstance(lossy, Law | Kaplan) else law.best_loss(flops)
    return [np.asarray(size), np.asarray(tokens), np.asarray(loss)]


def _fitted(fitted: Fitted, points: Points, definition: str) -> Plain:
    """One method. exponents: of N_opt and D_opt in C."""
    if fitted.law is None:
        return {"failed": fitted.why}
    law, drawn = fitted.law, fitted.drawn
    share = interval(float(law.exponent), _drawn(drawn, "exponent"), len(points))
    found: Plain = {
        "law": plain_law(law),
        "exponent": share.plain(),
        "draws": share.draws,
    }
    if isinstance(law, Law):
        found["intervals"] = {
            name: interval(float(getattr(law, name)), _drawn(drawn, name), len(points), name in "AB").plain()
            for name in NAMES
        }
    if isinstance(law, Law | Kaplan):
        found |= _quality(np.log(law.loss(points.size[definition], points.tokens)) - np.log(points.losses), points)
    if isinstance(fitted.fit, Fit3):
        found |= {
            "objective": fitted.fit.objective,
            "starts": fitted.fit.starts,
            "agreeing": fitted.fit.agreeing,
            "caveats": list(fitted.fit.caveats),
        }
    if isinstance(fitted.fit, Fit2):
        found["budgets"] = [_budget(each, points) for each in fitted.fit.budgets]
    if isinstance(fitted.fit, Fit1):
        thin = slice(None, None, max(len(fitted.fit.flops) // 60, 1))
        found["envelope"] = {
            name: [float(v) for v in getattr(fitted.fit, name)[thin]] for name in ("flops", "size", "loss")
        }
    return found


def _drawn(drawn: AnyLaw | None, name: str) -> Array:
    return np.empty(0) if drawn is None else np.asarray(getattr(drawn, name))


def _quality(residuals: Array, points: Points) -> Plain:
    """The quality of a fit, from its residuals in ln(loss): RMS, R² and the residual of each run."""
    spread = float(np.sum((np.log(points.losses) - np.log(points.losses).mean()) ** 2))
    return {
        "rms": float(np.sqrt(np.mean(residuals**2))),
        "r2": 1 - float(np.sum(residuals**2)) / spread if spread else None,
        "residuals": {run.id: float(each) for run, each in zip(points.runs, residuals, strict=True)},
    }


def _budget(budget: Budget, points: Points) -> Plain:
    found: Plain = {"flops": budget.flops, "runs": [points.runs[at].id for at in budget.places], "why": budget.why}
    if budget.curve is not None:
        found |= {
            "best": float(np.exp(budget.curve.vertex[0])),
            "lowest": float(budget.curve.lowest[0]),
            "curvature": float(budget.curve.curvature[0]),
        }
    return found


def _with_losses(fits: Mapping[str, Fitted], method: str) -> Fitted | None:
    """A method that tells the loss of any N and D: the chosen one, or else approach 3 or Kaplan's."""
    for name in (method, "approach3", "kaplan"):
        if isinstance(fits[name].law, Law | Kaplan):
            return fits[name]
    return None


def _held_out(chosen: Chosen, fitted: Fitted | None, settings: Settings) -> list[Plain]:
    """Predicted and measured losses. The interval is that of a single run: draws of the law, with a residual each."""
    if fitted is None or not isinstance(fitted.law, Law | Kaplan):
        return []
    points, law, drawn = chosen.held_out, fitted.law, fitted.drawn
    fit = chosen.fitted
    residuals = np.log(fit.losses) - np.log(law.loss(fit.size[settings.parameters], fit.tokens))
    found = []
    for at, run in enumerate(points.runs):
        size, tokens, measured = (
            float(points.size[settings.parameters][at]),
            float(points.tokens[at]),
            points.losses[at],
        )
        if not size > 0:
            continue
        predicted = float(law.loss(size, tokens))
        several = np.empty(0)
        if isinstance(drawn, Law | Kaplan):
            told = np.asarray(drawn.loss(size, tokens))
            several = told * np.exp(residuals[np.arange(len(told)) % len(residuals)])
        band = interval(predicted, several, len(fit))
        found.append(
            {
                "id": run.id,
                "slug": run.slug,
                "rung": run.rung,
                "parameters": size,
                "tokens": tokens,
                "times": float(6 * size * tokens / fit.flops(settings.parameters).max()),
                "measured": float(measured),
                "predicted": band.plain(),
                "error": predicted / float(measured) - 1,
                "inside": bool(band.low <= measured <= band.high) if band.draws else None,
            }
        )
    return found


def _sensitivity(chosen: Chosen, settings: Settings) -> Plain:
    """Approach 3 with more or fewer of the highest losses left out, and with other deltas."""
    points, whole = chosen.fitted, chosen.undropped

    def row(some: Points, delta: float) -> Plain:
        try:
            law = fit3(some.size[settings.parameters], some.tokens, some.losses, delta).law
        except InputError as error:
            return {"failed": str(error)}
        return plain_law(law) | {"exponent": float(law.exponent)}

    own = settings.drop if isinstance(settings.drop, int) else 0
    drops = [each for each in sorted({*DROPS, own}) if len(whole) - each >= MIN_RUNS + 2 or each == own]
    return {
        "drop": [{"drop": each} | row(without_highest(whole, each), settings.delta) for each in drops],
        "delta": [{"delta": each} | row(points, each) for each in sorted({*DELTAS, settings.delta}, reverse=True)],
    }


def _scan(scan: Scan) -> Plain:
    return {
        "key": scan.key,
        "estimator": ESTIMATOR,
        "cells": [
            {
                "label": cell.label,
                "family": in_words(cell.family),
                "N": cell.size,
                "D": cell.tokens,
                "batch": cell.batch if np.isfinite(cell.batch) else None,
                "points": [[float(scan.seen.values[at]), float(np.exp(scan.seen.losses[at]))] for at in cell.places],
                "near": [float(scan.seen.values[at]) for at in cell.near],
                "best": cell.best if cell.curve else None,
                "lowest": float(np.exp(cell.curve.lowest[0])) if cell.curve else None,
                "curvature": float(cell.curve.curvature[0]) if cell.curve else None,
                "why": cell.why,
            }
            for cell in scan.cells
        ],
        "laws": [_power_law(family, len(scan.seen.values)) for family in scan.families],
    }


def _power_law(family: Family, count: int) -> Plain:
    """count: of the runs that were drawn."""
    found: Plain = {"setting": dict(family.setting), "family": in_words(family.setting), "why": family.why}
    if (law := family.law) is None:
        return found
    return found | {
        "regressors": list(law.regressors),
        "constant": interval(float(law.coefficients[0]), law.drawn[:, 0], count).plain(),
        "exponents": {
            name: interval(float(law.coefficients[at]), law.drawn[:, at], count).plain()
            for at, name in enumerate(law.regressors, 1)
        },
        "cells": law.cells,
        "rms": law.rms,
        "spans": {name: list(span) for name, span in law.spans.items()},
    }


def _task(task: Task) -> Plain:
    found: Plain = {
        "name": task.name,
        "losses": [float(each) for each in task.losses],
        "values": [float(each) for each in task.values],
        "why": task.why,
    }
    if task.sigmoid is not None and task.error is not None and task.rms is not None:
        a, b, k, middle = map(float, task.sigmoid)
        most, log_k, gamma = map(float, task.error)
        found["sigmoid"] = {"a": a, "b": b, "k": k, "middle": middle, "rms": task.rms[0]}
        found["error_law"] = {"most": most, "ln_k": log_k, "gamma": gamma, "rms": task.rms[1]}
    return found
