"""Makes cells of settings, with derived values, by the ordinary rules of a configuration. Collects all problems."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor
from typing import Any

from megalite.base.errors import InputError, Problem
from megalite.config.convert import from_plain, keys, options, to_plain
from megalite.config.identity import run_id
from megalite.config.load import typed, with_values
from megalite.config.model_schema import Model
from megalite.config.rules.validate import check, validate
from megalite.config.schema import Config
from megalite.experiment.cell import Cell, Counts, slug_of
from megalite.experiment.expression import ExpressionError
from megalite.experiment.read import ExperimentError, Setup
from megalite.experiment.settings import Settings

MAX_ROUNDING = 0.05  # most that rounding to whole sequences or steps may change a number
MAX_LISTED = 100  # problems
FLOP_FACTOR = 6  # FLOPs of a parameter and token, as scaling laws count compute: C = 6·N·D


@dataclass(frozen=True)
class Point:
    """A requested run: its settings by key, and in `axes` those that are swept."""

    settings: Settings
    axes: Mapping[str, Any]
    gpus: int
    seed: int
    rung: str = ""
    places: Mapping[str, str] = field(default_factory=dict)  # key -> where its value comes from; else from the base
    budget: float | None = None
    of: str = ""  # unit of the budget: tokens_per_parameter, tokens or flops
    decay: float | None = None  # share of the steps in which a rate decays, if a trunk says so
    words: Mapping[str, Any] = field(default_factory=dict)  # parts of the slug, by key


class Builder:
    """Makes the cells of one experiment, and collects what is wrong with them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.size = setup.experiment.parameters.fit
        self.problems: dict[str, list[str]] = {}  # by text, the runs that have it
        self.excluded = 0
        self._plain: Any = dict(setup.base)
        self._refers = "${" in json.dumps(self._plain, default=str) or "${" in json.dumps(setup.changes, default=str)
        self._counts: dict[str, Counts] = {}

    def cell(self, point: Point) -> Cell | None:
        """The cell of a point; None if it is excluded, or has a problem."""
        try:
            return self._made(point)
        except InputError as error:
            self._note(point, error)
            return None

    def _made(self, point: Point) -> Cell | None:
        """The cell of a point; None if it is excluded. Raises InputError with its problems."""
        settings = {**self.setup.changes, **point.settings, "run.seed": point.seed}
        plain = with_values(self._plain, settings)
        config = self._typed(plain)
        if point.of or self.setup.derive:
            config = self._typed(with_values(plain, self._derived(config, point)))
        names = _Names(config, point, self)
        try:
            if any(each.holds(names) for each in self.setup.exclude):
                self.excluded += 1
                return None
        except ExpressionError as error:
            raise InputError([Problem("exclude", str(error))]) from None
        if problems := validate(config, point.gpus):
            raise InputError(problems)
        if config.parallel.dp_shard == "auto":
            config = check(config, point.gpus)
        plain, systems = to_plain(config), self.setup.kind == "systems"
        axes = {key: names(key) if value == "auto" else value for key, value in point.axes.items()}
        return Cell(
            run_id(plain, keeps_layout=systems),
            slug_of(point.words),
            self.setup.kind,
            config,
            plain,
            point.gpus,
            point.rung,
            axes if systems else point.axes,
            point.budget,
        )

    def _typed(self, plain: dict[str, Any]) -> Config:
        """The configuration. Raises InputError with its problems."""
        config, problems = typed(plain) if self._refers else from_plain(plain)
        if problems:
            raise InputError(problems)
        return config

    def counts(self, model: Model) -> Counts:
        key = repr(model)
        if key not in self._counts:
            self._counts[key] = Counts.of(model)
        return self._counts[key]

    def wrong(self, key: str, rule: str, fix: str = "", run: str = "") -> None:
        """Take note of a problem."""
        self.problems.setdefault(str(Problem(key, rule, fix)), []).append(run)

    def raise_problems(self) -> None:
        """Raises ExperimentError if there was a problem, each told once with the runs that have it."""
        if not self.problems:
            return
        told: list[Problem] = []
        for text, runs in list(self.problems.items())[:MAX_LISTED]:
            where = f" (run {runs[0]}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''})" if runs[0] else ""
            told.append(_Told(f"{text}{where}"))
        if len(self.problems) > MAX_LISTED:
            told.append(_Told(f"and {len(self.problems) - MAX_LISTED} more"))
        raise ExperimentError(self.setup.path, told)

    def _note(self, point: Point, error: InputError) -> None:
        """Take note of the problems of a run, each with the place in the experiment file that it comes from."""
        for problem in error.problems or [Problem("the run", str(error))]:
            key = problem.key.partition("[")[0]
            place = point.places.get(problem.key) or point.places.get(key)
            place = place or (f"set.{key}" if key in self.setup.changes else "")
            place = place or (f"derive.{key}" if key in self.setup.derive else "")
            text = f"{place}: {problem}" if place else str(problem)
            self.problems.setdefault(text, []).append(slug_of(point.words))

    def _derived(self, config: Config, point: Point) -> Settings:
        """Values of derived keys, and the steps that a budget takes with them. Raises InputError."""
        found: Settings = {}
        names = _Names(config, point, self)
        for key, expression in self.setup.derive.items():
            try:
                value: Any = expression.value(names)
            except ExpressionError as error:
                raise InputError([Problem(f"derive.{key}", str(error), value=expression.text)]) from None
            if isinstance(value, float) and int in options(keys()[key]):
                unit = _unit(config, point.gpus) if key == "batch.global" else 1
                value = _whole(value, unit, f"derive.{key}", expression.text)
            found[key] = names.known[key] = value
        return found | self._steps(config, point, names) if point.of else found

    def _steps(self, config: Config, point: Point, names: "_Names") -> Settings:
        """The steps of a budget, and of a trunk its decay. Raises InputError."""
        wanted = names.tokens / (names("batch.global") * config.model.sequence_length)
        steps = max(round(wanted), 1)
        if abs(steps / wanted - 1) > MAX_ROUNDING:
            rule = f"takes {wanted:.3g} steps, and {steps} are off by more than 5 %"
            fix = "use a smaller batch.global, or a larger budget"
            raise InputError([Problem(f"{point.of} = {point.budget:g}", rule, fix)])
        if point.decay is None:
            return {"train.steps": steps}
        decay = max(floor(point.decay * steps), 1)
        return {"train.steps": steps, "schedule.name": "wsd", "schedule.decay": decay}


def _whole(value: float, unit: int, where: str, text: str) -> int:
    """The multiple of `unit` next to `value`. Raises InputError where that is another number altogether."""
    whole = max(round(value / unit), 1) * unit
    if value <= 0 or abs(whole / value - 1) > MAX_ROUNDING:
        of = f"multiple of {unit}" if unit > 1 else "whole number"
        rule = f"comes to {value:.6g}, and the next {of}, {whole}, is off by more than 5 %"
        fix = "round it in the expression, as with pow2, or change batch.micro or the layout"
        raise InputError([Problem(where, rule, fix, text)])
    return whole


class _Told(Problem):
    """A problem that is a text already."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "")

    def __str__(self) -> str:
        return self.key


class _Names:
    """Values of names in expressions about a run."""

    def __init__(self, config: Config, point: Point, builder: Builder) -> None:
        self.config, self.point, self.builder = config, point, builder
        self.known: Settings = {}  # values that were derived before

    def __call__(self, name: str) -> Any:
        config = self.config
        match name:
            case "N":
                return self.parameters
            case "D":
                return self.tokens
            case "C":
                return FLOP_FACTOR * self.parameters * self.tokens
            case "steps":
                return self.tokens / (self("batch.global") * config.model.sequence_length)
            case "width" | "layers" | "heads" | "sequence_length":
                return getattr(config.model, name)
            case "gpus":
                return self.point.gpus
            case "seed":
                return self.point.seed
            case "budget" if self.point.budget is not None:
                return self.point.budget
        if name in self.known:
            return self.known[name]
        value: Any = config
        if name not in keys():
            raise KeyError(name)
        for part in name.split("."):
            value = getattr(value, part, None) if hasattr(value, part) else getattr(value, f"{part}_", None)
        return value

    @property
    def parameters(self) -> int:
        return self.builder.counts(self.config.model).by(self.builder.size)

    @property
    def tokens(self) -> float:
        """Tokens of the whole training."""
        match self.point.of:
            case "tokens_per_parameter":
                return (self.point.budget or 0) * self.parameters
            case "tokens":
                return self.point.budget or 0
            case "flops":
                return (self.point.budget or 0) / (FLOP_FACTOR * self.parameters)
        return self.config.train.steps * self("batch.global") * self.config.model.sequence_length


def _unit(config: Config, gpus: int) -> int:
    """The number of samples that divides a global batch: a micro-batch of every data-parallel rank."""
    parallel = config.parallel
    dp = gpus // max(parallel.pp * parallel.cp * parallel.tp, 1)
    micro = config.batch.micro
    return max(dp, 1) * (micro if isinstance(micro, int) else 1)
