"""The planner's prediction of a case, which stands beside its measurement. Imports no torch."""

from dataclasses import replace
from functools import cache
from typing import Any

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.gpu_names import cluster_of
from megalite.cost.predict import predict
from megalite.cost.stages import Timer
from megalite.plan.model.size import flops_per_token
from megalite_launch.preflight.smi import SmiError, ask
from megalite_tools.bench.training.cases import MEGALITE, Case, Target
from megalite_tools.plan.published.profiles import PROFILES, UNKNOWN_SPREAD

REHEARSAL_CLUSTER = "h100_sxm"  # the cluster of predictions in a rehearsal, which nothing is compared with
PROFILE_NAMES = {  # in PROFILES, by implementation and whether it is compiled; others have none
    ("torchtitan", False): "torchtitan",
    ("torchtitan", True): "torchtitan_2025",
}


@cache
def cluster(target: Target) -> Cluster | None:
    """The cluster file of the GPUs here; None where none is known."""
    if target.device == "cpu":
        return load_cluster(REHEARSAL_CLUSTER)
    try:
        names = ask(["--query-gpu=name", "--format=csv,noheader"], 20).splitlines()
    except SmiError:
        return None
    name = cluster_of(names[0].strip()) if names else None
    return load_cluster(name) if name else None


def predicted(case: Case, target: Target) -> dict[str, Any] | None:
    """Milliseconds of a step, both MFUs, and the half of the interval's width, relative; None on an unknown GPU."""
    on, config = cluster(target), case.config(target.device)
    if on is None:
        return None
    try:
        if case.implementation in ("", MEGALITE):
            found = predict(config, on)
            seconds, spread = found.seconds, found.spread
        else:
            seconds, spread = _of_program(case, config, on)
    except InputError:  # a schedule that cannot run: the case itself will tell
        return None
    told = {"cluster": on.name, "step_ms": round(1e3 * seconds, 2), "spread": spread}
    return {**told, **mfu(config, seconds, on, case.ranks)}


def mfu(config: Config, seconds: float, on: Cluster | None, ranks: int) -> dict[str, float | None]:
    """Model FLOPs utilization with attention counted in full, `F`, and as the causal half that is computed, `C`."""
    if on is None:
        return {"F": None, "C": None}
    rate = config.batch.global_ * config.model.sequence_length / seconds / ranks
    peak = on.gpu.peak.get(config.train.dtype, on.gpu.peak["bf16"])
    return {
        "F": flops_per_token(config.model, "full") * rate / peak,
        "C": flops_per_token(config.model, "causal") * rate / peak,
    }


def _of_program(case: Case, config: Config, on: Cluster) -> tuple[float, float]:
    """Seconds of another program's step, and how far that may be off."""
    recompute = "selective" if case.selective or config.train.recompute == "budget" else config.train.recompute
    program = PROFILES[PROFILE_NAMES.get((case.implementation, config.train.compile), "unknown")]
    found = predict(replace(config, train=replace(config.train, recompute=recompute)), on, Timer(on, program=program))
    return found.seconds, found.spread if program.known else UNKNOWN_SPREAD
