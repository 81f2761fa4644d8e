"""The runs of a systems experiment: layouts on several numbers of ranks, by hand, by grid or of the planner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from megalite.config.load import typed, with_values
from megalite.config.rules.validate import validate
from megalite.config.schema import Config
from megalite.cost.cluster import load_cluster
from megalite.cost.layout_choice import Choice
from megalite.cost.stages import Timer
from megalite.experiment.build import Builder, Point
from megalite.experiment.read import Setup
from megalite.experiment.schema import Measure
from megalite.experiment.settings import Settings, flattened, read_axes
from megalite.layout_search.search import search
from megalite.plan.memory.fit import TENSOR_SHARE

MAX_PLANNED_LAYOUTS = 50
WAYS = "give {plan: 5}, a list such as [{parallel.tp: 2}], or {grid: {parallel.tp: [1, 2]}}"


def system_points(setup: Setup, builder: Builder) -> Iterator[Point]:
    """A point for every number of ranks, layout, setting that is swept and repeat.

    With `scaling: weak`, every data-parallel rank keeps the sequences that it has on the fewest ranks: the global batch
    grows with the data-parallel ranks, not with all ranks. Else the global batch stays.
    """
    experiment = setup.experiment
    measure = experiment.measure or Measure()
    counts = sorted(experiment.gpus or [])
    timed: Settings = {
        "train.steps": measure.warmup + measure.steps,
        "log.interval": 1,
        "eval.steps": 0,
        "checkpoint.interval": 0,
        "schedule.warmup": 0,
    }
    for axes in setup.axes.points:
        for gpus, layout in _layouts(setup, builder, counts, axes):
            batch = _batch(setup, builder, counts[0], gpus, {**axes, **layout})
            if batch is None:
                continue
            settings = {**timed, **axes, **layout, "batch.global": batch}
            swept = {**axes, **layout}
            words = {"gpus": gpus, **swept}
            places = {key: f"layouts: {key}" for key in layout} | {"batch.global": "scaling: batch.global"}
            for repeat in range(measure.repeats):
                words = {**words, "repeat": repeat} if measure.repeats > 1 else words
                yield Point(settings, swept, gpus, repeat, places=places, words=words)


def _layouts(setup: Setup, builder: Builder, counts: Sequence[int], axes: Settings) -> Iterator[tuple[int, Settings]]:
    """The layouts of each number of ranks, as settings."""
    layouts = setup.experiment.layouts
    if layouts is None:
        layouts = [{}]
    if isinstance(layouts, dict):
        if list(layouts) == ["plan"] and type(layouts["plan"]) is int and 1 <= layouts["plan"] <= MAX_PLANNED_LAYOUTS:
            yield from _planned(setup, builder, counts, layouts["plan"], axes)
            return
        if list(layouts) != ["grid"] or not isinstance(layouts["grid"], dict):
            builder.wrong("layouts", "is no way to give layouts", WAYS)
            return
        problems: list[Any] = []
        listed = list(read_axes(layouts["grid"], (), None, problems).points)
    else:
        problems = []
        listed = [flattened(layout, f"layouts[{at}]", problems) for at, layout in enumerate(layouts)]
    for problem in problems:
        builder.wrong(problem.key, problem.rule, problem.fix)
    if not problems:
        # A key that one layout names and another does not has the base's value there: it is an axis of both.
        named = list(dict.fromkeys(key for layout in listed for key in layout))
        whole = [{key: layout.get(key, _of_base(setup, key)) for key in named} for layout in listed]
        yield from product(counts, whole)


def _planned(
    setup: Setup, builder: Builder, counts: Sequence[int], wanted: int, axes: Settings
) -> Iterator[tuple[int, Settings]]:
    """The planner's best layouts. With weak scaling those of the fewest ranks, to which more replicas are added.

    A curve of weak scaling compares one layout with itself.
    """
    name = setup.experiment.launch.cluster or setup.base["run"].get("cluster")
    if name is None:
        builder.wrong("layouts.plan", "needs to know the cluster", "set launch.cluster, as in h100_sxm")
        return
    timer = Timer(load_cluster(name, "launch.cluster = "))
    limit = timer.cluster.gpu.memory * TENSOR_SHARE
    weak = setup.experiment.scaling == "weak"
    found: list[Settings] = []
    for gpus in counts:
        if not weak or not found:
            config, problems = typed(with_values(dict(setup.base), {**setup.changes, **axes}))
            if problems:
                for problem in problems:
                    builder.wrong(problem.key, problem.rule, problem.fix)
                return
            config = replace(config, run=replace(config.run, device="cuda"))  # a cluster's, whatever this machine has
            results = search(config, gpus, timer, limit, wanted=wanted).results
            if not results:
                told = f"finds no layout for {gpus} ranks of {name} that fits into memory"
                builder.wrong("layouts.plan", told, "ask for more ranks, or a smaller model")
                return
            found = [_settings(result.choice, weak) for result in results]
        yield from ((gpus, layout) for layout in found)


def _settings(choice: Choice, weak: bool) -> Settings:
    """A choice of the planner as settings. With weak scaling, the ranks that share states grow with all ranks."""
    settings: Settings = {
        "parallel.pp": choice.pp,
        "parallel.dp_replicate": choice.replicas,
        "parallel.dp_shard": "auto" if weak else choice.shards,
        "parallel.cp": choice.cp,
        "parallel.tp": choice.tp,
        "parallel.pipeline.schedule": choice.schedule,
        "parallel.pipeline.virtual_stages": choice.virtual,
        "parallel.context.method": choice.method,
        "parallel.data.mode": choice.mode,
        "batch.micro": choice.micro,
        "train.recompute": choice.recompute,
        "train.offload_activations": choice.offload_activations,
        "optim.placement": choice.states,
    }
    return settings


def _batch(setup: Setup, builder: Builder, fewest: int, gpus: int, settings: Settings) -> int | None:
    """The global batch of a layout; None if the layout does not fit the numbers of ranks."""
    config, problems = typed(with_values(dict(setup.base), {**setup.changes, **settings}))
    if problems:
        for problem in problems:
            builder.wrong(problem.key, problem.rule, problem.fix)
        return None
    batch = config.batch.global_
    if setup.experiment.scaling != "weak":
        return batch
    first, here = _dp(config, fewest), _dp(config, gpus)
    if not first or not here or batch % first:
        problems = validate(config, fewest) or validate(config, gpus)
        for problem in problems:
            builder.wrong(problem.key, f"{problem.rule} (on {gpus if first else fewest} ranks)", problem.fix)
        if not problems:
            rule = f"{batch} is no multiple of the {first} data-parallel ranks on {fewest} ranks"
            builder.wrong("batch.global", rule, "change batch.global")
        return None
    return batch // first * here


def _dp(config: Config, gpus: int) -> int:
    """Data-parallel ranks; 0 if the layout does not divide the ranks."""
    inner = config.parallel.pp * config.parallel.cp * config.parallel.tp
    return 0 if inner < 1 or gpus % inner else gpus // inner


def _of_base(setup: Setup, key: str) -> Any:
    value: Any = setup.changes.get(key)
    if key in setup.changes:
        return value
    value = setup.base
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
