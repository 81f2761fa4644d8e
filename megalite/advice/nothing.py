"""Why a search has found no layout, and what would help."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from megalite.advice.asked import Asked
from megalite.advice.rows import layout_text
from megalite.config.errors import InputError, counted, listing
from megalite.config.validate import check
from megalite.planner.choice import Choice
from megalite.planner.search import Found
from megalite.planner.space import Space
from megalite.terminal import memory

MORE = 64  # times the GPUs that were asked for: up to so many are tried
MOVING = ("activations", "temporaries")  # kinds of memory that shorter sequences make less


def nothing_fits(asked: Asked, gpus: int, found: Found) -> str:
    """The message for a search on `gpus` GPUs without a result."""
    if found.tightest is None or not _possible(asked, gpus, asked.pins):
        return f"--gpus {gpus}: no layout is possible with {_contradicting(asked, gpus)}"
    limit, (estimated, choice) = round(asked.limit), found.tightest
    needed, moving = _needed(asked, gpus, choice)
    least = "at least " * (needed is None)
    needed = round(estimated) if needed is None else needed
    over = needed - limit
    enough = _enough(asked, gpus)
    ways = ["--offload"] * (not asked.offload)
    ways += ["a shorter model.sequence_length"] * (moving > over)
    ways += ["fewer pinned keys"] * bool(asked.pins)
    ways.append(f"{enough:,} GPUs, which are enough" if enough else "more GPUs")
    return (
        f"--gpus {gpus:,}: no layout fits into the {memory(limit)} that tensors may take of a GPU; the one that is "
        f"estimated to need least is {layout_text(choice)}: it needs {least}{memory(needed)}, {memory(over)} too many; "
        f"use {listing(ways)}"
    )


def _needed(asked: Asked, gpus: int, choice: Choice) -> tuple[int | None, int]:
    """Bytes of the fullest rank under a layout, and how many of these depend on the length of sequences.

    None for a layout that cannot run.
    """
    try:
        _, found = asked.predict(check(asked.applied(choice), gpus))
    except InputError:
        return None, 0
    return found.total, sum(sum(found.of(kind).values()) for kind in MOVING)


def _enough(asked: Asked, gpus: int) -> int | None:
    """The first double of `gpus` on which a layout fits."""
    doubles = (gpus << power for power in range(1, MORE.bit_length()))
    with Console(stderr=True).status("No layout fits. Trying more GPUs ..."):
        return next((count for count in doubles if asked.search(count, 1).results), None)


def _possible(asked: Asked, gpus: int, pins: Mapping[str, Any]) -> bool:
    """Whether there is a layout with these pins, whatever memory it needs."""
    space = Space(asked.config, gpus, asked.timer, pins, asked.offload)
    shapes = (shape for shape in space.shapes(float("inf")) if space.sharings(shape))
    return any(True for shape in shapes for _ in space.pipelines(shape.choice))


def _contradicting(asked: Asked, gpus: int) -> str:
    """The pinned keys that leave no layout, which of them may be left out for one, and the rules."""
    batch, model = asked.config.batch, asked.config.model
    if not asked.pins:
        return (
            f"batch.global = {batch.global_:,}: data-parallel ranks must divide it, and tp, cp and pp must divide the "
            f"GPUs, model.heads = {model.heads}, model.kv_heads = {model.kv_heads} and so on; use a multiple of the "
            "GPUs as batch.global"
        )

    def shown(keys: Iterable[str]) -> str:
        return ", ".join(f"{key} = {json.dumps(asked.pins[key])}" for key in keys)

    needed = list(asked.pins)  # of the keys, some that contradict each other: without any of them there is a layout
    for key in asked.pins:
        fewer = [each for each in needed if each != key]
        if not _possible(asked, gpus, {each: asked.pins[each] for each in fewer}):
            needed = fewer
    rule = (
        f"their products must divide {gpus:,} GPUs, data-parallel ranks times batch.micro must divide batch.global = "
        f"{batch.global_:,}, and the model has heads = {model.heads}, kv_heads = {model.kv_heads} and layers = "
        f"{model.layers}, of which every pipeline stage needs one"
    )
    file = Space(asked.config, gpus, asked.timer, asked.pins, asked.offload).file
    if file is not None and "parallel.pipeline.schedule" in needed:
        rule += (
            f"; the file's schedule is for {counted(file.ranks, 'pipeline rank')}, {counted(file.stages, 'stage')} and "
            f"{counted(file.micro_batches, 'micro-batch', 'micro-batches')}"
        )
    if not needed:
        return f"batch.global = {batch.global_:,} and any keys: {rule}; use a multiple of the GPUs as batch.global"
    alone = "it" if len(needed) == 1 else "any one of these"
    return f"{shown(needed)}: {rule}; leave {alone} out, or use another --gpus"
