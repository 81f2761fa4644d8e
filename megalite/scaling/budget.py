"""Plans a run for a budget: a model of the ladder's shape, tokens, steps, batch, rate and layout, and expected loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megalite.base.errors import InputError, counted
from megalite.base.files import is_file
from megalite.config.convert import to_plain
from megalite.config.load import load
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.stages import Timer
from megalite.cost.whole_run import HOUR, WholeRun, run_of
from megalite.experiment.folder import cell_text
from megalite.layout_search.search import Result, search
from megalite.plan.memory.fit import TENSOR_SHARE
from megalite.scaling.bootstrap import Interval, interval
from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS
from megalite.scaling.methods import AnyLaw
from megalite.scaling.rates import BATCH, RATE
from megalite.scaling.shapes import Rule, size_of
from megalite.scaling.show import amount_text
from megalite.scaling.stored import Stored
from megalite.scaling.table import Results, cell_value
from megalite_launch.base.texts import memory_text

FIRST_MFU, ROUNDS, BUDGET_TOLERANCE = 0.4, 12, 0.005  # settings of the search for the budget that GPU-hours are
RANGE_TOLERANCE = 1.05  # times a bound of the fitted runs that still count as within them


@dataclass(frozen=True)
class Bought:
    """size, tokens, loss: of the model chosen, by the law; best: N and D that the law would have. times: how far it is.

    layout, run: on the cluster, where one was named. told: what to mind.
    """

    config: Config
    flops: float
    size: float
    tokens: float
    loss: Interval
    best: tuple[Interval, Interval]
    times: Mapping[str, float]
    layout: Result | None
    run: WholeRun | None
    told: tuple[str, ...]


@dataclass(frozen=True)
class ClusterGpus:
    """A cluster and how many of its GPUs."""

    cluster: Cluster
    gpus: int


def rung_configs(stored: Stored, results: Results) -> list[Config]:
    """The configurations of fitted runs, one for each model, the smallest first."""
    some, found = set(stored.fit["data"]["used"]), dict[tuple[int, int, int], Config]()
    for run in results.runs:
        path = stored.folder / "runs" / run.name / "config.yaml"
        if run.id in some and is_file(path):
            config = load([str(path)])
            found.setdefault((config.model.width, config.model.layers, config.model.ffn), config)
    if not found:
        raise InputError(
            f"{stored.folder / 'runs'}: no fitted run has its config.yaml there, so there is no shape to follow; keep "
            "the run folders, or copy their config.yaml back"
        )
    return sorted(found.values(), key=lambda config: size_of(config.model, stored.settings.parameters))


def buy(
    stored: Stored,
    results: Results,
    rates: Stored | None,
    *,
    flops: float | None = None,
    gpu_hours: float | None = None,
    machine: ClusterGpus | None = None,
) -> Bought:
    """Plan a run for `flops` = 6·N·D, or for GPU-hours on a machine. rates: an experiment with laws of rate and batch.

    Raises InputError where there is no law, no shape, or no layout that fits.
    """
    if stored.best is None:
        raise InputError(f"{stored.folder}: has no fitted law; run megalite-sweep fit on a ladder first")
    configs = rung_configs(stored, results)
    rule = Rule.of([config.model for config in configs], stored.settings.parameters)
    base = configs[-1]
    if flops is not None:
        return _for_flops(stored, rule, base, rates, flops, machine)
    if gpu_hours is None or machine is None:
        raise InputError("--gpu-hours: needs --cluster and --gpus, which say what an hour computes")
    peak = machine.cluster.gpu.peak
    budget = gpu_hours * HOUR * peak.get(base.train.dtype, peak["bf16"]) * FIRST_MFU
    for _ in range(ROUNDS):
        found = _for_flops(stored, rule, base, rates, budget, machine)
        taken = gpu_hours if found.run is None else found.run.gpu_hours
        if abs(gpu_hours / taken - 1) < BUDGET_TOLERANCE:
            return found
        budget *= gpu_hours / taken
    told = f"It takes {taken:,.1f} GPU-hours; sizes and layouts come in steps, and none is nearer."
    return replace(found, told=(*found.told, told))


def _for_flops(
    stored: Stored, rule: Rule, base: Config, rates: Stored | None, flops: float, machine: ClusterGpus | None
) -> Bought:
    assert stored.best is not None
    law, drawn = stored.best
    wanted = float(np.asarray(law.optimum(flops)[0]))
    if not np.isfinite(wanted) or wanted < 1:
        raise InputError(f"{flops:.3g} FLOPs: the law has no best size there; fit more budgets")
    model = rule.nearest(wanted)
    size = float(size_of(model, stored.settings.parameters))
    tokens = flops / FLOPS / size
    runs, told = int(stored.fit["data"]["runs"]), list[str]()
    config = _configured(stored, rates, base, replace(base, model=model), size, tokens, machine, told)
    times = _distance(stored, flops, size, tokens, told)
    layout, run = (None, None) if machine is None else _planned(config, tokens, machine)
    config = config if layout is None else replace(layout.prediction.config, run=replace(config.run, device="cuda"))
    best = [
        interval(float(np.asarray(value)), _several(drawn, flops, at), runs, True)
        for at, value in enumerate(law.optimum(flops))
    ]
    return Bought(
        config,
        flops,
        size,
        tokens,
        _loss(stored, flops, size, tokens, runs),
        (best[0], best[1]),
        times,
        layout,
        run,
        tuple(told),
    )


def _several(drawn: AnyLaw | None, flops: float, which: int) -> Array:
    return np.empty(0) if drawn is None else np.asarray(drawn.optimum(flops)[which])


def _loss(stored: Stored, flops: float, size: float, tokens: float, runs: int) -> Interval:
    """The loss expected at this N and D; at the budget's best, where no law gives the loss of any N and D."""
    if stored.losses is not None:
        law, drawn = stored.losses
        several = np.empty(0) if drawn is None else np.asarray(drawn.loss(size, tokens))
        return interval(float(np.asarray(law.loss(size, tokens))), several, runs)
    assert stored.best is not None
    best, again = stored.best
    several = np.empty(0) if again is None else np.asarray(again.best_loss(flops))
    return interval(float(np.asarray(best.best_loss(flops))), several, runs)


def _distance(stored: Stored, flops: float, size: float, tokens: float, told: list[str]) -> dict[str, float]:
    """Ratios of FLOPs, N and D to the largest fitted ones. A warning about those out of range goes to `told`."""
    span = stored.fit["data"]["span"]
    values = {"flops": flops, "parameters": size, "tokens": tokens}
    away = []
    for name, value in values.items():
        low, high = span[name]
        if value > high * RANGE_TOLERANCE:
            away.append(f"{name} {value / high:,.3g} times the largest fitted, {amount_text(high)}")
        elif value < low / RANGE_TOLERANCE:
            away.append(f"{name} {low / value:,.3g} times below the smallest fitted, {amount_text(low)}")
    if away:
        told.append(
            f"This leaves the runs that were fitted: {'; '.join(away)}. The interval tells how those runs scatter, not "
            "whether the law holds there."
        )
    return {name: value / span[name][1] for name, value in values.items()}


def _configured(
    stored: Stored,
    rates: Stored | None,
    base: Config,
    config: Config,
    size: float,
    tokens: float,
    machine: ClusterGpus | None,
    told: list[str],
) -> Config:
    """Return the configuration with batch, rate and steps, as far as laws give them; the rest is the largest rung's."""
    fitted = [each for each in (rates, stored) if each]
    known = {"N": size, "D": tokens}
    if law := _law(BATCH, fitted, base, told):
        batch = _rounded(_at(law, known, BATCH, told), machine.gpus if machine else 1)
    else:
        batch = _rounded(base.batch.global_, machine.gpus if machine else 1)
        told.append(f"No law of {BATCH} was fitted: {batch:,} is the largest rung's, as far as the GPUs divide it.")
    if law := _law(RATE, fitted, base, told):
        rate = float(f"{_at(law, known | {'batch': float(batch)}, RATE, told):.4g}")
    else:
        rate = base.optim.lr
        told.append(
            f"No law of {RATE} was fitted: {rate:g} is the largest rung's. Rates seldom stay best at other sizes."
        )
    steps = max(round(tokens / batch / config.model.sequence_length), 1)
    share = steps / base.train.steps
    decay = base.schedule.decay
    schedule = replace(
        base.schedule,
        warmup=round(base.schedule.warmup * share),
        decay=None if decay is None else max(round(decay * share), 1),
    )
    if base.train.dtype != "bf16" and machine:
        told.append(f"train.precision = {base.train.dtype}, as in the ladder; bf16 takes less time on GPUs.")
    return replace(
        config,
        run=replace(base.run, name=f"{stored.settings.name or 'predicted'}-{size:.3g}".replace("+", ""), dir="runs"),
        batch=replace(base.batch, global_=batch, micro=1, memory=None, rampup=None, curriculum=None),
        train=replace(base.train, steps=steps),
        optim=replace(base.optim, lr=rate),
        schedule=schedule,
        checkpoint=replace(base.checkpoint, resume="auto", weights=None),
    )


def _law(key: str, fitted: Sequence[Stored], config: Config, told: list[str]) -> Mapping[str, Any] | None:
    """The power law of cells with the settings of `config`, of the first experiment that has one."""
    plain = to_plain(config)
    for each in fitted:
        laws = [law for scan in each.fit["rates"] if scan["key"] == key for law in scan["laws"] if not law["why"]]
        for law in laws:
            if all(_axis(plain, name) == value for name, value in law["setting"].items()):
                return law
        if laws:
            families = "; ".join(law["family"] for law in laws)
            told.append(f"The laws of {key} were fitted for other settings than the ladder's: {families}.")
    return None


def _axis(plain: Any, name: str) -> float | str:
    """The value of a dotted key as an axis of `results.csv` has it."""
    for part in name.split("."):
        plain = plain.get(part) if isinstance(plain, dict) else None
    return cell_value(str(cell_text(plain)))


def _at(law: Mapping[str, Any], known: Mapping[str, float], key: str, told: list[str]) -> float:
    logs = law["constant"][0]
    for name, (exponent, _, _) in law["exponents"].items():
        logs += exponent * np.log(known[name])
        low, high = law["spans"][name]
        beyond = max(known[name] / high, low / known[name])
        if beyond > RANGE_TOLERANCE:
            told.append(f"The law of {key} is used {beyond:.3g} times beyond the {name} that it was fitted to.")
    return float(np.exp(logs))


def _rounded(batch: float, gpus: int) -> int:
    """The nearest power of two, times what of `gpus` is odd, so that many layouts divide it."""
    odd = gpus // (gpus & -gpus)
    return int(odd * 2 ** max(round(np.log2(max(batch / odd, 1))), 0))


def _planned(config: Config, tokens: float, machine: ClusterGpus) -> tuple[Result, WholeRun]:
    cluster = machine.cluster
    asked = replace(config, run=replace(config.run, device="cuda"))
    found = search(asked, machine.gpus, Timer(cluster), cluster.gpu.memory * TENSOR_SHARE, wanted=1)
    if not found.results:
        shape = config.model
        why = "none divides the batch and the model"
        if found.tightest is not None:
            why = f"the nearest needs {memory_text(found.tightest[0])}"
        raise InputError(
            f"--gpus {machine.gpus}: no layout of {counted(shape.layers, 'layer')} of width {shape.width:,} with "
            f"{config.batch.global_:,} sequences a step fits {cluster.gpu.name}: {why}; use more GPUs, or a number "
            f"that {config.batch.global_:,} is a multiple of"
        )
    result = found.results[0]
    return result, run_of(result.prediction, tokens)
