"""Caveats that a reader of a fit should know, in sentences."""

from collections.abc import Mapping

import numpy as np

from megalite.base.errors import counted
from megalite.scaling.approach3 import Fit3
from megalite.scaling.bootstrap import MAX_LEVERAGE
from megalite.scaling.kaplan import FitKaplan
from megalite.scaling.methods import MIN_BOOTSTRAP_RUNS, Fitted
from megalite.scaling.points import Chosen
from megalite.scaling.settings import Settings

MIN_RUNS, MIN_DECADES, MIN_STEPS = 25, 1.5, 1000  # below these, docs/scaling.md tells what was measured
MIN_R_SQUARED = 0.95
OUTLIER_DEVIATIONS = 6.0  # robust standard deviations of a residual
MAX_EXPONENT_GAP = 0.08  # difference of exponents by different ways


def caveats(chosen: Chosen, fits: Mapping[str, Mapping[str, Fitted]], settings: Settings) -> list[str]:
    points, told = chosen.fitted, list(chosen.caveats)
    sizes = points.size[settings.parameters]
    spans = [("parameters", sizes), ("tokens", points.tokens)]
    for name, values in spans:
        decades = float(np.log10(values.max() / values.min()))
        if decades < MIN_DECADES:
            told.append(
                f"The {name} of the fitted runs span {decades:.1f} decades. Span matters more than the number of runs: "
                f"below {MIN_DECADES} decades exponents are off by up to .1."
            )
    if len(points) < MIN_RUNS:
        told.append(f"{counted(len(points), 'run')} were fitted; with fewer than {MIN_RUNS}, intervals are wide.")
    if len(points) < MIN_BOOTSTRAP_RUNS and settings.bootstrap:
        told.append(f"There are no intervals: drawing fewer than {MIN_BOOTSTRAP_RUNS} runs again tells none.")
    steps = np.array([run.number("steps") for run in points.runs])
    if np.isfinite(steps).any() and np.nanmin(steps) < MIN_STEPS:
        few = points.runs[int(np.nanargmin(steps))].name
        told.append(
            f"The shortest fitted run has {np.nanmin(steps):,.0f} steps ({few}). Runs of few steps are behind their "
            "size and bend fits; fit.min_steps leaves them out."
        )
    main = fits[settings.parameters]
    told += _hanging(main, chosen)
    told += _of_fit(main["approach3"], chosen)
    told += _apart(fits, settings)
    if (held := chosen.held_out) and not len(held) and settings.holdout:
        told.append(f"No run of the held-out rungs ({', '.join(settings.holdout)}) has finished.")
    return told


def _hanging(fits: Mapping[str, Fitted], chosen: Chosen) -> list[str]:
    """Laws that hang on one run, which therefore have no intervals."""
    told: dict[str, list[str]] = {}
    for fitted in fits.values():
        if isinstance(fitted.fit, Fit3 | FitKaplan) and fitted.fit.leverage.max() >= MAX_LEVERAGE:
            told.setdefault(chosen.fitted.runs[int(np.argmax(fitted.fit.leverage))].name, []).append(fitted.method)
    return [
        f"The law of {' and '.join(methods)} has no intervals: it goes through {name} whatever its loss is, so nothing "
        "tells how far that run's noise has moved it. Train that size on other numbers of tokens too."
        for name, methods in told.items()
    ]


def _of_fit(fitted: Fitted, chosen: Chosen) -> list[str]:
    if not isinstance(fitted.fit, Fit3):
        return []
    told, residuals = list(fitted.fit.caveats), fitted.fit.residuals
    logs = np.log(chosen.fitted.losses)
    explained = 1 - float(np.sum(residuals**2) / np.sum((logs - logs.mean()) ** 2))
    if explained < MIN_R_SQUARED:
        told.append(
            f"The law explains {max(explained, 0.0):.0%} of the variance of the losses (R²), and runs of a ladder "
            "usually give over 99 %: do not predict with it before you know why."
        )
    scale = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    for at in np.argsort(-np.abs(residuals))[:3]:
        off = float(residuals[at] - np.median(residuals))
        if abs(off) > max(OUTLIER_DEVIATIONS * scale, 1e-4):
            told.append(
                f"{chosen.fitted.runs[at].name} is far from the law: its measured loss is {-residuals[at]:+.1%} off. "
                "Look at that run; the sensitivity table tells what the highest losses do to the law."
            )
    return told


def _apart(fits: Mapping[str, Mapping[str, Fitted]], settings: Settings) -> list[str]:
    """Exponents that depend on the definition of N, or on the method."""
    told = []
    by_definition = {
        name: float(each[settings.method].law.exponent)  # type: ignore[union-attr]
        for name, each in fits.items()
        if each[settings.method].law is not None
    }
    if len(by_definition) > 1 and max(by_definition.values()) - min(by_definition.values()) > MAX_EXPONENT_GAP:
        words = ", ".join(f"{value:.2f} ({name})" for name, value in by_definition.items())
        told.append(f"The exponent of N_opt depends on what counts as a parameter: {words}. Compare like with like.")
    by_method = {
        name: float(each.law.exponent)
        for name, each in fits[settings.parameters].items()
        if each.law is not None and name != "kaplan"
    }
    if len(by_method) > 1 and max(by_method.values()) - min(by_method.values()) > MAX_EXPONENT_GAP:
        words = ", ".join(f"{value:.2f} ({name})" for name, value in by_method.items())
        told.append(f"The methods disagree about the exponent of N_opt: {words}.")
    return told
