"""The best learning rate and batch of every cell of a sweep, and power laws through them.

A cell holds runs that differ in the scanned key, and perhaps in the seed. Its optimum is the vertex of a parabola of
ln(loss) over the logarithm of the key, through the lowest point and up to two different ones on each side. Only a
vertex between measured points counts, with a higher loss on both sides. The raw minimum of a grid leads to
other laws: on the runs of Step Law (arXiv 2503.04715), N^-.82 instead of N^-.71.

A power law goes through cells that differ in N, D and batch alone. Cells of another parametrization or optimizer, for
example, are another family and have a law of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megalite.base.errors import counted
from megalite.scaling.approach2 import budgets_of
from megalite.scaling.bootstrap import draws
from megalite.scaling.forms import Array
from megalite.scaling.parabola import MIN_PLACES, Parabola, parabola
from megalite.scaling.table import Results, RunResult

Setting = Mapping[str, float | str]
RATE, BATCH = "optim.lr", "batch.global"
NEIGHBOURS = 2  # different values on each side of the lowest
ESTIMATOR = "vertex of ln(loss) as a parabola of the logarithm, through the lowest point and up to two on each side"


@dataclass(frozen=True)
class ScannedValues:
    """n values of a key, each with the ln(loss) that it led to.

    settings: the other axes. size, tokens, batch: of the model and its training. weights: `[g, n]`, how often each
    counts in g draws. drawn: ln(loss) `[g, n]` in draws, where they differ.
    """

    names: tuple[str, ...]
    settings: tuple[Setting, ...]
    values: Array
    losses: Array
    size: Array
    tokens: Array
    batch: Array
    weights: Array
    drawn: Array | None = None


@dataclass(frozen=True)
class Cell:
    """Runs that differ in one key only. setting: the other axes; label: those that cells differ in, in words.

    family: the axes among them that N, D and batch do not follow from. places: of the runs among all seen. near: the
    places that the parabola goes through. why: the reason where there is no optimum between them.
    """

    label: str
    setting: Setting
    family: Setting
    size: float
    tokens: float
    batch: float
    places: Array
    near: Array
    curve: Parabola | None
    why: str = ""

    @property
    def best(self) -> float:
        return float(np.exp(self.curve.vertex[0])) if self.curve else np.nan


@dataclass(frozen=True)
class PowerLaw:
    """best = exp(constant) · Π regressor^exponent, through as many `cells`.

    coefficients: the constant and the exponents. drawn: `[g, 1 + regressors]`, the same of draws.
    rms: of ln(best), where there are more cells than unknowns. spans: of each regressor.
    """

    key: str
    regressors: tuple[str, ...]
    coefficients: Array
    drawn: Array
    cells: int
    rms: float | None
    spans: Mapping[str, tuple[float, float]]

    def at(self, values: Mapping[str, float]) -> float:
        """The best value of the key for values of the regressors."""
        logs = [1.0, *(np.log(values[name]) for name in self.regressors)]
        return float(np.exp(np.dot(self.coefficients, logs)))


@dataclass(frozen=True)
class Family:
    """Cells with one setting of all axes but those of size, tokens and batch: their law, or why there is none."""

    setting: Setting
    law: PowerLaw | None
    why: str = ""


@dataclass(frozen=True)
class Scan:
    """A key that was scanned: what was seen, its cells, and the families that these are of."""

    key: str
    seen: ScannedValues
    cells: tuple[Cell, ...]
    families: tuple[Family, ...]


def scans(results: Results, which: str, definition: str, samples: int) -> list[Scan]:
    """The optima of the learning rate and of the batch, as far as a sweep varies them inside of cells.

    Where both were varied, the best batch is that of the losses at the best rate of each batch.
    """
    found = []
    rate = _scan(RATE, _seen(results, RATE, which, definition, samples))
    if rate is not None:
        found.append(rate)
    best = [cell for cell in rate.cells if cell.curve is not None] if rate else []
    given = _at_best_rate(rate, best) if rate and best else _seen(results, BATCH, which, definition, samples)
    batch = _scan(BATCH, given)
    return [*found, batch] if batch is not None else found


def _seen(results: Results, key: str, which: str, definition: str, samples: int) -> ScannedValues | None:
    """The finished runs of a sweep that varies `key`."""
    if key not in results.axes:
        return None
    runs = [run for run in results.done() if _usable(run, key, which, definition)]
    if not runs:
        return None

    def column(name: str) -> Array:
        return np.array([run.number(name) for run in runs])

    tokens = column("tokens")
    for places in budgets_of(tokens):  # rounds of a sweep may differ in length alone
        tokens[places] = tokens[places[0]]
    return ScannedValues(
        tuple(run.name for run in runs),
        tuple(
            {**{name: run.axes[name] for name in results.axes if name != key}, "tokens": float(tokens[at])}
            for at, run in enumerate(runs)
        ),
        np.array([run.axes[key] for run in runs], float),
        np.log(column(which)),
        column(f"n_{definition}"),
        column("tokens"),
        column("batch_global"),
        draws(len(runs), samples) if samples else np.empty((0, len(runs))),
    )


def _usable(run: RunResult, key: str, which: str, definition: str) -> bool:
    value = run.axes[key]
    known = run.number(which) > 0 and run.number("tokens") > 0 and run.number(f"n_{definition}") > 0
    return known and isinstance(value, float) and value > 0


def _at_best_rate(rate: Scan, best: Sequence[Cell]) -> ScannedValues | None:
    """Each batch with the loss at its best rate."""
    if any(not isinstance(cell.setting.get(BATCH), float) for cell in best):
        return None
    again = [_redrawn(rate.seen, cell) for cell in best]
    inside = np.stack([curve.inside for curve in again], axis=1)
    return ScannedValues(
        tuple(cell.label for cell in best),
        tuple({name: value for name, value in cell.setting.items() if name != BATCH} for cell in best),
        np.array([cell.setting[BATCH] for cell in best], float),
        np.array([cell.curve.lowest[0] for cell in best if cell.curve]),
        np.array([cell.size for cell in best]),
        np.array([cell.tokens for cell in best]),
        np.array([cell.batch for cell in best]),
        inside.astype(float),
        np.stack([curve.lowest for curve in again], axis=1),
    )


def _redrawn(seen: ScannedValues, cell: Cell) -> Parabola:
    losses = seen.losses[cell.near] if seen.drawn is None else seen.drawn[:, cell.near]
    return parabola(np.log(seen.values[cell.near]), losses, seen.weights[:, cell.near])


def _scan(key: str, seen: ScannedValues | None) -> Scan | None:
    """Find the optima of a scanned key; None where no cell has two values of the key."""
    if seen is None:
        return None
    groups: dict[tuple[float | str, ...], list[int]] = {}
    for at, setting in enumerate(seen.settings):
        groups.setdefault(tuple(setting.values()), []).append(at)
    if all(len(np.unique(seen.values[places])) < 2 for places in groups.values()):
        return None
    settings = [seen.settings[places[0]] for places in groups.values()]
    shown = _telling(settings)
    sizes = [_facts(seen, np.array(places)) for places in groups.values()]
    apart = _apart(settings, shown, [each if key != BATCH else each[:2] for each in sizes])
    cells = [
        _cell(setting, shown, apart, facts, seen, np.array(places))
        for setting, facts, places in zip(settings, sizes, groups.values(), strict=True)
    ]
    families = []
    for family in dict.fromkeys(tuple(cell.family.items()) for cell in cells):
        some = [cell for cell in cells if tuple(cell.family.items()) == family]
        families.append(Family(dict(family), *_law(key, some, seen)))
    return Scan(key, seen, tuple(cells), tuple(families))


def _telling(settings: Sequence[Setting]) -> list[str]:
    """The axes in which settings differ, without those that follow from one before them, as zipped ones do."""
    found: list[str] = []
    for name in settings[0]:
        values = [setting[name] for setting in settings]
        follows = any(
            len({(s[first], s[name]) for s in settings}) == len({s[first] for s in settings}) for first in found
        )
        if len(set(values)) > 1 and not follows:
            found.append(name)
    return found


def _facts(seen: ScannedValues, places: Array) -> tuple[float, float, float]:
    """The size, tokens and batch of a cell: geometric means."""
    size, tokens, batch = (
        float(np.exp(np.mean(np.log(each[places])))) for each in (seen.size, seen.tokens, seen.batch)
    )
    return size, tokens, batch


def _apart(settings: Sequence[Setting], names: Sequence[str], facts: Sequence[Sequence[float]]) -> list[str]:
    """The axes that make a difference where size, tokens and batch are the same."""
    known = [tuple(np.round(np.log(each), 3)) for each in facts]
    return [
        name
        for name in names
        if len({(each, setting[name]) for each, setting in zip(known, settings, strict=True)}) > len(set(known))
    ]


def in_words(setting: Setting) -> str:
    """Such as `model.parametrization mup, model.width 64`."""
    return ", ".join(f"{name} {axis_value(value)}" for name, value in setting.items())


def axis_value(value: float | str) -> str:
    """The text of a value that an experiment varies."""
    return f"{value:g}" if isinstance(value, float) else value


def _cell(
    setting: Setting,
    shown: Sequence[str],
    apart: Sequence[str],
    facts: tuple[float, float, float],
    seen: ScannedValues,
    places: Array,
) -> Cell:
    values, losses = seen.values[places], seen.losses[places]
    label = in_words({name: setting[name] for name in shown}) or "all runs"
    family = {name: setting[name] for name in apart}
    different = np.unique(values)

    def made(near: Array, curve: Parabola | None, why: str = "") -> Cell:
        return Cell(label, setting, family, *facts, places, near, curve, why)

    def none(why: str, near: Array = places) -> Cell:
        return made(near, None, why)

    if len(different) < MIN_PLACES:
        return none(f"{counted(len(different), 'value')} with a loss, and {MIN_PLACES} are needed")
    means = np.array([losses[values == value].mean() for value in different])
    lowest = int(np.argmin(means))
    if lowest in (0, len(different) - 1):
        return none(f"the {'largest' if lowest else 'smallest'} value with a loss has the lowest one")
    window = different[max(lowest - NEIGHBOURS, 0) : lowest + NEIGHBOURS + 1]
    near = places[np.isin(values, window)]
    curve = parabola(np.log(seen.values[near]), seen.losses[near])
    if not curve.inside[0]:
        return none("the parabola has no minimum between measured values", near)
    return made(near, curve)


def _law(key: str, cells: Sequence[Cell], seen: ScannedValues) -> tuple[PowerLaw | None, str]:
    used = [cell for cell in cells if cell.curve is not None]
    known = {"N": [cell.size for cell in used], "D": [cell.tokens for cell in used]}
    if key != BATCH:
        known["batch"] = [cell.batch for cell in used]
    design, names = np.ones((len(used), 1)), list[str]()
    for name, column in known.items():
        wider = np.column_stack([design, np.log(column)])
        told = np.isfinite(wider).all() and np.linalg.matrix_rank(wider / np.abs(wider).max(axis=0, initial=1e-9), 1e-6)
        if len(used) and told == wider.shape[1]:
            design = wider
            names.append(name)
    if not names or len(used) < design.shape[1]:
        have = f"{counted(len(used), 'cell')} of {len(cells)} {'has' if len(used) == 1 else 'have'}"
        return None, f"{have} an optimum between measured values; a power law needs some that differ in N, D or batch"
    best = np.log([cell.best for cell in used])
    coefficients: Array = np.asarray(np.linalg.lstsq(design, best, rcond=None)[0], np.float64)
    spare = len(used) - design.shape[1]
    rms = float(np.sqrt(np.sum((best - design @ coefficients) ** 2) / spare)) if spare else None
    spans = {name: (min(known[name]), max(known[name])) for name in names}
    return PowerLaw(key, tuple(names), coefficients, _drawn(used, design, seen), len(used), rms, spans), ""


def _drawn(used: Sequence[Cell], design: Array, seen: ScannedValues) -> Array:
    """The coefficients of every draw; nan where too few cells keep an optimum."""
    again = [_redrawn(seen, cell) for cell in used]
    inside = np.stack([curve.inside for curve in again], axis=1)
    best = np.stack([curve.vertex for curve in again], axis=1)
    found = np.full((len(inside), design.shape[1]), np.nan)
    for number, mask in enumerate(inside):
        some = design[mask]
        if len(some) >= design.shape[1] and np.linalg.matrix_rank(some) == design.shape[1]:
            found[number] = np.linalg.lstsq(some, best[number][mask], rcond=None)[0]
    return found
