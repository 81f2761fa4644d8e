"""Explanation of one layout: where its time and memory go, and which single change would help most."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import InputError, counted, number_ranges
from megalite.base.terminal import memory_unit, table
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import fits_text, layout_text
from megalite.config.rules.numbers import every_divisor
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.layout_choice import Choice, choice_of
from megalite.cost.predict import Prediction
from megalite.cost.texts import PARTS, step_text, turns_text
from megalite.cost.whole_run import goodput
from megalite.layout_search.time_bounds import VIRTUAL_STAGES
from megalite.plan.memory.peak import KINDS, Memory, crowded, memory_of_ranks
from megalite.plan.memory.rebalance import flatter_split
from megalite.plan.pipeline import pairs_up
from megalite.plan.split import split_without_mtp
from megalite.schedule.generate import NAMES
from megalite_launch.base.texts import memory_text, rounded, seconds_text, time_unit

BAR_WIDTH = 40  # characters of the longest bar
LISTED_CHANGES = 6  # changes
MIN_GAIN = 0.005  # share of a step's time that a change must save to be worth telling


@dataclass(frozen=True)
class Change:
    """A layout that differs from another in one thing. text: what changes."""

    text: str
    choice: Choice
    prediction: Prediction
    memory: Memory


def explained(asked: Asked, config: Config, prediction: Prediction, memory: Memory) -> list[tuple[str, RenderableType]]:
    """Return the headings of an explanation and what stands under them."""
    choice = choice_of(config)
    parts: list[tuple[str, RenderableType]] = [
        (
            f"{layout_text(choice)}, on {counted(prediction.gpus, 'GPU')} of {asked.cluster.gpu.name}",
            _summary(prediction),
        ),
        ("Where a step's time goes, on the busiest pipeline rank", _time(prediction)),
    ]
    if config.parallel.pp > 1:
        parts.append(("Pipeline stages, times of a micro-batch", _stages(prediction)))
    if turns := turns_text(prediction):
        parts.append(("Passes in turns", Text(turns)))
    if choice.split is not None:
        parts.append(("Layers of the stages", _split(asked, config, prediction, memory)))
    parts.append((f"Where memory goes, on pipeline rank {memory.pp} at its peak", _memory(memory, asked.limit)))
    if config.parallel.ep > 1 and not config.parallel.fixed_buffers:
        parts.append(("If all tokens choose the experts of one rank", _crowded(config, memory, asked.limit)))
    found = changes(asked, config)
    if memory.total > asked.limit:
        parts.append(("The nearest changes that fit", _fitting(asked, config, found)))
    else:
        parts.append(("Single changes that would help most", _helping(asked, prediction, found)))
    return parts


def changes(asked: Asked, config: Config) -> list[Change]:
    """List all layouts that differ from that of `config` in one thing, and can run."""
    choice, world = choice_of(config), config.parallel.layout.world_size
    found = []
    for text, other in _others(asked, choice, config):
        try:
            changed = check(other.applied(config, {}), world)
            found.append(Change(text, other, *asked.predict(changed)))
        except InputError:
            continue
    if pairs_up(config):
        pipeline = replace(config.parallel.pipeline, overlap=False)
        alone = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
        found.append(Change("parallel.pipeline.overlap=false", choice, *asked.predict(alone)))
    return found


def _others(asked: Asked, choice: Choice, config: Config) -> Iterator[tuple[str, Choice]]:
    """Yield changes of one thing. If another axis of the layout grows or shrinks, data parallelism makes up for it."""
    dp, batch = choice.replicas * choice.shards, config.batch.global_
    for axis in ("tp", "cp", "pp"):
        size, other = getattr(choice, axis), choice._replace(split=None) if axis == "pp" else choice
        for factor in (2, 3):
            if dp % factor == 0:
                more = other._replace(**{axis: size * factor}, replicas=1, shards=dp // factor)
                yield f"parallel.{axis}={size * factor}", more
            if size % factor == 0:
                fewer = other._replace(**{axis: size // factor}, replicas=1, shards=dp * factor)
                yield f"parallel.{axis}={size // factor}", fewer
    for ep in (2 * choice.ep, choice.ep // 2) if config.model.experts else ():
        yield f"parallel.ep={ep}", choice._replace(ep=ep)
    for micro in every_divisor(batch // dp, choice.micro * 2):
        if micro in (choice.micro * 2, choice.micro // 2):
            yield f"batch.micro={micro}", choice._replace(micro=micro)
    for recompute in ("none", "selective", "full"):
        if recompute != choice.recompute:
            yield f"train.recompute={recompute}", choice._replace(recompute=recompute)
    for mode in ("ddp", "zero1", "zero2", "zero3"):
        if mode != choice.mode and dp * choice.cp > 1:
            yield f"parallel.data.mode={mode}", choice._replace(mode=mode)
    for replicas in every_divisor(dp):
        if replicas in (choice.replicas * 2, choice.replicas // 2, 1) and replicas != choice.replicas:
            yield f"parallel.dp_replicate={replicas}", choice._replace(replicas=replicas, shards=dp // replicas)
    if choice.cp > 1:
        for method in ("ring", "all_gather", "ulysses"):
            if method != choice.method:
                yield f"parallel.context.method={method}", choice._replace(method=method)
    if choice.pp > 1:
        for schedule in NAMES:
            for virtual in VIRTUAL_STAGES if schedule == "interleaved_1f1b" else (None,):
                if (schedule, virtual) != (choice.schedule, choice.virtual):
                    stages = f" parallel.pipeline.virtual_stages={virtual}" if virtual else ""
                    other = choice._replace(schedule=schedule, virtual=virtual, split=None)
                    yield f"parallel.pipeline.schedule={schedule}{stages}", other
    if not choice.offload_activations:
        yield "train.offload_activations=true", choice._replace(offload_activations=True)
    if choice.states == "device":
        yield "optim.placement=host", choice._replace(states="host")


def _summary(prediction: Prediction) -> Text:
    share, interval = goodput(prediction)
    return Text(
        f"A step of {prediction.step_tokens:,} tokens takes {step_text(prediction)}: "
        f"{prediction.tokens_per_second:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%} (attention counted in full: "
        f"{prediction.mfu_full:.1%}).\nWith a checkpoint every {seconds_text(interval)} and a failure now and then, "
        f"{share:.1%} of the time makes steps that count."
    )


def _time(prediction: Prediction) -> Table:
    size, unit = time_unit(prediction.seconds)
    shown = table("", unit, "share", " ", text=("", " "))
    longest = max(prediction.parts.values())
    for name, text in PARTS.items():
        seconds = prediction.parts[name]
        if seconds > 1e-4 * prediction.seconds:
            bar = "█" * max(1, round(BAR_WIDTH * seconds / longest))
            shown.add_row(text, rounded(seconds / size), f"{seconds / prediction.seconds:.1%}", bar)
    shown.add_row("step", rounded(prediction.seconds / size), "100.0%", "", style="bold")
    return shown


def _stages(prediction: Prediction) -> Table:
    """Make the table of pipeline stages; equal neighbours share a row."""
    shown = table("stage", "layers", "forward", "backward", "gather", "reduce", text=("stage",))
    rows = [
        (len(layers), *(seconds_text(value) for value in (stage.forward.total, stage.backward.total, stage.gather,
                                                     stage.reducing(True))))
        for layers, stage in zip(prediction.plan.layers, prediction.stages, strict=True)
    ]  # fmt: skip
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[start]:
            count, *times = rows[start]
            shown.add_row(number_ranges(list(range(start, index))), str(count), *map(str, times))
            start = index
    return shown


def _split(asked: Asked, config: Config, prediction: Prediction, memory: Memory) -> Text:
    """Compare time and memory of a split that is not the default with those of the default."""
    pipeline = replace(config.parallel.pipeline, split=None)
    default = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
    before, held = asked.predict(default)
    return Text(
        f"parallel.pipeline.split={config.parallel.pipeline.split}: {seconds_text(prediction.seconds)} a step, with "
        f"{memory_text(memory.total)} on the fullest rank.\nThe default, {split_without_mtp(default)}: "
        f"{seconds_text(before.seconds)}, and it {fits_text(held.total, asked.limit)}."
    )


def _memory(memory: Memory, limit: float) -> Table:
    name, unit = memory_unit(memory.total)
    shown = table("", name, "share", " ", text=("", " "))
    sizes = {kind: sum(memory.of(kind).values()) for kind in KINDS}
    longest = max(sizes.values())
    for kind, size in sizes.items():
        if size:
            bar = "█" * max(1, round(BAR_WIDTH * size / longest))
            shown.add_row(kind, f"{size / unit:,.2f}", f"{size / memory.total:.1%}", bar)
            largest = sorted(memory.of(kind).items(), key=lambda item: -item[1])
            for component, part in largest[:3] if len(largest) > 1 else ():
                shown.add_row(f"  {component}", f"{part / unit:,.2f}", f"{part / memory.total:.1%}", "")
    shown.add_row("total", f"{memory.total / unit:,.2f}", "100.0%", str(fits_text(memory.total, limit)), style="bold")
    return shown


def _crowded(config: Config, memory: Memory, limit: float) -> Text:
    """Say what the fullest rank needs at most where no choice is equal."""
    most = crowded(config, memory)
    fits = "which fits" if most <= limit else "which does not fit"
    return Text(f"Then it needs up to {memory_text(most)}, {fits}, in place of {memory_text(memory.total)}.")


def _helping(asked: Asked, prediction: Prediction, found: list[Change]) -> RenderableType:
    useful = [each for each in found if each.memory.total <= asked.limit]
    faster = sorted(
        (each for each in useful if each.prediction.seconds < (1 - MIN_GAIN) * prediction.seconds), key=_seconds
    )
    if not faster:
        return Text(f"None of {len(found)} single changes makes a step more than {MIN_GAIN:.1%} faster and fits.")
    return _changes(faster, prediction)


def _fitting(asked: Asked, config: Config, found: list[Change]) -> RenderableType:
    fitting = sorted((each for each in found if each.memory.total <= asked.limit), key=_seconds)
    if fitting:
        return _changes(fitting, None)
    split, costing = None, asked.timer.costs
    if config.parallel.pp > 1:
        split = flatter_split(config, memory_of_ranks(config, costing), costing)
    if split and split[1] <= asked.limit:
        return Text(f"parallel.pipeline.split=[{', '.join(map(str, split[0]))}] would fit: {memory_text(split[1])}")
    least = min(found, key=lambda each: each.memory.total, default=None)
    if least is None:
        return Text("No single change can run.")
    return Text(f"No single change fits. {least.text} comes nearest, with {memory_text(least.memory.total)}.")


def _changes(found: list[Change], before: Prediction | None) -> Table:
    shown = table("change", "step", "saves" if before else "tokens/s/GPU", "memory", text=("change",))
    for each in found[:LISTED_CHANGES]:
        of = each.prediction
        third = f"{1 - of.seconds / before.seconds:.1%}" if before else f"{of.tokens_per_second:,.0f}"
        shown.add_row(each.text, seconds_text(of.seconds), third, memory_text(each.memory.total))
    return shown


def _seconds(change: Change) -> float:
    return change.prediction.seconds
