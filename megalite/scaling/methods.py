"""The methods that fit a ladder, side by side for one definition of N."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megalite.base.errors import InputError
from megalite.scaling.allocation import Allocation
from megalite.scaling.approach1 import Fit1, drawn1, fit1
from megalite.scaling.approach2 import Fit2, fit2
from megalite.scaling.approach3 import MIN_RUNS, Fit3, fit3, refit
from megalite.scaling.bootstrap import MAX_LEVERAGE, draws
from megalite.scaling.forms import Array
from megalite.scaling.kaplan import FitKaplan, Kaplan, fit_kaplan
from megalite.scaling.law import Law
from megalite.scaling.points import Points
from megalite.scaling.settings import Settings

AnyLaw = Law | Kaplan | Allocation
KINDS: Mapping[str, type[Law] | type[Kaplan] | type[Allocation]] = {
    "approach3": Law,
    "approach1": Allocation,
    "approach2": Allocation,
    "kaplan": Kaplan,
}
MIN_BOOTSTRAP_RUNS = 9  # with fewer, draws of them tell no interval


@dataclass(frozen=True)
class Fitted:
    """The result of one method: its law, the laws of draws, and its own fit. why: the reason for no result."""

    method: str
    law: AnyLaw | None
    drawn: AnyLaw | None = None
    fit: Fit1 | Fit2 | Fit3 | FitKaplan | None = None
    why: str = ""


def fit_all(points: Points, definition: str, settings: Settings) -> dict[str, Fitted]:
    """Every method that these runs allow. Raises InputError if that of the settings is not among them."""
    sizes, tokens, losses = points.size[definition], points.tokens, points.losses
    samples = settings.bootstrap if len(points) >= MIN_BOOTSTRAP_RUNS else 0
    weights = draws(len(points), samples, MIN_RUNS) if samples else None

    def third() -> Fitted:
        fit = fit3(sizes, tokens, losses, settings.delta)
        drawn = None
        if weights is not None and fit.leverage.max() < MAX_LEVERAGE:
            drawn = refit(fit, sizes, tokens, losses, settings.delta, weights)
        return Fitted("approach3", fit.law, drawn, fit)

    def first() -> Fitted:
        fit = fit1(sizes, tokens, losses)
        return Fitted("approach1", fit.law, None if weights is None else drawn1(sizes, tokens, losses, weights), fit)

    def second() -> Fitted:
        # A budget's FLOPs do not depend on the definition of N that is fitted.
        fit = fit2(sizes, points.flops(settings.parameters), losses, weights)
        return Fitted("approach2", fit.law, fit.drawn, fit)

    def old() -> Fitted:
        fit = fit_kaplan(sizes, tokens, losses, settings.delta, weights)
        return Fitted("kaplan", fit.law, fit.drawn, fit)

    known: dict[str, Callable[[], Fitted]] = {
        "approach3": third,
        "approach1": first,
        "approach2": second,
        "kaplan": old,
    }
    found = {}
    for method, make in known.items():
        if not (np.isfinite(sizes) & (sizes > 0)).all():
            found[method] = Fitted(method, None, why=f"some runs have no n_{definition}")
            continue
        try:
            found[method] = make()
        except InputError as error:
            found[method] = Fitted(method, None, why=str(error))
    return found


def plain_law(law: AnyLaw) -> dict[str, Any]:
    """The fields of a law as JSON; of draws, lists with null for those that tell none."""
    return {name: _plain(value) for name, value in asdict(law).items()}


def law_of(method: str, found: Mapping[str, Any]) -> AnyLaw:
    """The law whose fields `plain_law` gave. Raises KeyError, TypeError or ValueError for anything else."""
    kind = KINDS[method]
    values = {each.name: found[each.name] for each in fields(kind)}
    return kind(**{name: np.array(v, float) if isinstance(v, list) else float(v) for name, v in values.items()})


def _plain(value: float | Array) -> Any:
    if isinstance(value, np.ndarray):
        return [float(f"{each:.9g}") if np.isfinite(each) else None for each in value]
    return float(value)
