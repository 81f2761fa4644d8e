"""Predictions of a layout and of the search's best ones on fewer and more GPUs."""

from dataclasses import dataclass, replace
from fractions import Fraction

from megalite.base.errors import InputError
from megalite.commands.plan.request import Asked
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.layout_choice import Choice, choice_of
from megalite.cost.predict import Prediction, predict
from megalite.layout_search.search import fullest_rank, search

FACTORS = (Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8))


@dataclass(frozen=True)
class Point:
    """One number of GPUs. best: of the search; same: the layout with more data-parallel ranks. None: nothing fits."""

    gpus: int
    batch: int
    best: Prediction | None
    same: Prediction | None


def scaling(asked: Asked, prediction: Prediction, fastest: Prediction | None, grows: bool) -> list[Point]:
    """Predict this layout, and the best one, at FACTORS times the GPUs of `prediction`.

    fastest: on as many GPUs as `prediction`; None: the best layouts are not looked for. grows: the batch grows with the
    GPUs (weak scaling) instead of staying as it is (strong scaling).
    """
    found = []
    for factor in FACTORS:
        gpus, batch = prediction.gpus * factor, asked.config.batch.global_ * (factor if grows else Fraction(1))
        if gpus.denominator > 1 or batch.denominator > 1:
            continue
        config = replace(asked.config, batch=replace(asked.config.batch, global_=int(batch)))
        best = fastest
        same: Prediction | None = prediction
        if factor != 1:
            same = _same(asked, config, choice_of(prediction.config), factor)
            best = _best(asked, config, int(gpus)) if fastest else None
        found.append(Point(int(gpus), int(batch), best, same))
    return found


def _best(asked: Asked, config: Config, gpus: int) -> Prediction | None:
    found = search(config, gpus, asked.timer, asked.limit, asked.pins, wanted=1, offload=asked.offload)
    return found.results[0].prediction if found.results else None


def _same(asked: Asked, config: Config, choice: Choice, factor: Fraction) -> Prediction | None:
    """The layout with `factor` times the data-parallel ranks; None if it cannot run or does not fit."""
    replicated = choice.replicas > 1
    ranks = (choice.replicas if replicated else choice.shards) * factor
    if ranks.denominator > 1:
        return None
    other = choice._replace(replicas=int(ranks)) if replicated else choice._replace(shards=int(ranks))
    world = other.tp * other.cp * other.pp * other.replicas * other.shards
    try:
        checked = check(other.applied(config, asked.pins), world)
        if fullest_rank(checked, asked.timer).total > asked.limit:
            return None
        return predict(checked, asked.cluster, asked.timer)
    except InputError:
        return None
