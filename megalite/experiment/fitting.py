"""Rules of what an experiment says about its fits: the sections `fit` and `parameters`."""

from collections.abc import Iterator

from megalite.base.errors import Problem
from megalite.experiment.schema import Fit, Sizes

MAX_DELTA, MAX_SAMPLES, MAX_STEPS = 10.0, 10_000, 10**12


def fit_rules(fit: Fit, parameters: Sizes) -> Iterator[Problem]:
    """Every broken rule. The sections have the types of the schema."""
    if not 0 < fit.delta <= MAX_DELTA:
        yield Problem("fit.delta", f"must be above 0, at most {MAX_DELTA:g}", value=fit.delta)
    if not 0 <= fit.min_steps <= MAX_STEPS:
        yield Problem("fit.min_steps", f"must be from 0 to {MAX_STEPS:,}", value=fit.min_steps)
    if isinstance(fit.drop, int) and fit.drop < 0:
        rule = "must be how many runs with the highest losses are left out, or a list of ids and slugs"
        yield Problem("fit.drop", rule, value=fit.drop)
    if not 0 <= fit.bootstrap <= MAX_SAMPLES:
        yield Problem("fit.bootstrap", f"must be from 0 to {MAX_SAMPLES:,}", value=fit.bootstrap)
    if len(set(parameters.report)) < len(parameters.report):
        yield Problem("parameters.report", "names one twice", "leave one out", parameters.report)
