"""`megalite show`, the section "Expected": which GPUs a configuration fits, and on a cluster its step time and cost."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import counted
from megalite.base.terminal import table
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.predict import Prediction, predict
from megalite.cost.texts import money, step_text
from megalite.cost.whole_run import run_of
from megalite.plan.batches import samples_after
from megalite.plan.memory.fit import GIB, TENSOR_SHARE
from megalite.plan.memory.peak import Memory
from megalite_launch.base.texts import memory_text, rounded, seconds_text

GPU_SIZES = (24, 40, 80, 141, 192)  # GiB of GPUs that there are
MEMORY_HINT = "Memory is not predicted here, which takes a while: --memory tells whether this fits."


def expected(config: Config, memories: Sequence[Memory] | None, cluster: Cluster | None) -> tuple[str, RenderableType]:
    """Heading and text for a checked configuration with a number as `batch.micro`.

    memories: predicted, of every pipeline rank; None where that would take long. cluster: None for no times.
    """
    needed = None if memories is None else max(memory.total for memory in memories)
    if cluster is None:
        return "Expected (step time and cost with --cluster NAME)", _usual(needed)
    prediction = predict(config, cluster)
    note = _note(config)
    facts = _facts(config, prediction, needed)
    body = Group(facts, Text(note)) if note else facts
    return f"Expected on {prediction.gpus:,} × {cluster.gpu.name} ({cluster.name})", body


def _usual(needed: int | None) -> RenderableType:
    if needed is None:
        return Text(MEMORY_HINT)
    shown = table("GPU", "for tensors", "needed", "", text=("",))
    for size in GPU_SIZES:
        room = size * TENSOR_SHARE * GIB
        shown.add_row(f"{size} GiB", memory_text(room), memory_text(needed), _verdict(needed, room))
    return shown


def _verdict(needed: int, room: float) -> Text:
    return Text("fits", style="green") if needed <= room else Text("does not fit", style="bold red")


def _facts(config: Config, prediction: Prediction, needed: int | None) -> Table:
    shown = Table.grid(padding=(0, 2, 0, 0))
    room = prediction.cluster.gpu.memory * TENSOR_SHARE
    if needed is None:
        shown.add_row("memory", MEMORY_HINT)
    else:
        fits = _verdict(needed, room).append(f": {memory_text(needed)} of {memory_text(room)} for tensors")
        shown.add_row("memory", fits)
    steps = config.train.steps
    run = run_of(prediction, samples_after(config, steps) * config.model.sequence_length)
    shown.add_row("step", step_text(prediction))
    shown.add_row("tokens/s/GPU", f"{prediction.tokens_per_second:,.0f}")
    shown.add_row("MFU", f"{prediction.mfu:.1%} (attention counted in full: {prediction.mfu_full:.1%})")
    shown.add_row(counted(steps, "step"), f"{seconds_text(run.seconds)}, failures and checkpoints included")
    shown.add_row("GPU-hours", rounded(run.gpu_hours))
    shown.add_row("cost", f"{money(run.cost)} at ${prediction.cluster.price:.2f} for a GPU and an hour")
    return shown


def _note(config: Config) -> str:
    """Say what the expected numbers leave out; "" if nothing."""
    if config.batch.rampup is None and config.batch.curriculum is None:
        return ""
    return "Smaller batches and shorter sequences at the beginning are counted at the speed of full ones."
