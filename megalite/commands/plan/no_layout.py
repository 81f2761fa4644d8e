"""Why a search has found no layout, and what would help."""

import json
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop
from math import inf
from typing import Any

from rich.console import Console

from megalite.base.errors import InputError, counted, listing
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import layout_text
from megalite.config.rules.validate import check
from megalite.cost.layout_choice import Choice
from megalite.layout_search.search import Found, fullest_rank
from megalite.layout_search.space import Space
from megalite.plan.memory.peak import Memory
from megalite_launch.base.texts import memory_text

MAX_WALKS = 60  # layouts whose memory is walked through for the nearest
MAX_GPU_FACTOR = 64  # times the GPUs that were asked for: up to so many are tried
SEQUENCE_KINDS = ("activations", "temporaries")  # kinds of memory that shorter sequences make less


def nothing_fits(asked: Asked, gpus: int, found: Found) -> str:
    """The message for a search on `gpus` GPUs without a result."""
    possible = _possible(asked, gpus, asked.pins)
    if possible and found.tightest is None:
        return f"--gpus {gpus}: no layout can run: {_refusal(asked, gpus)}"
    if not possible:
        return f"--gpus {gpus}: no layout is possible with {_contradicting(asked, gpus)}"
    with Console(stderr=True).status("No layout fits. Looking for the nearest ..."):
        near, enough = nearest(asked, gpus), _enough(asked, gpus)
    if near is None:
        return f"--gpus {gpus}: no layout can run: {_refusal(asked, gpus)}"
    choice, memory = near
    over, moving = memory.total - round(asked.limit), sum(sum(memory.of(kind).values()) for kind in SEQUENCE_KINDS)
    ways = ["--offload"] * (not asked.offload)
    ways += ["a shorter model.sequence_length"] * (moving > over)
    ways += ["fewer pinned keys"] * bool(asked.pins)
    ways.append(f"{enough:,} GPUs, which are enough" if enough else "more GPUs")
    return (
        f"--gpus {gpus:,}: no layout fits into the {memory_text(asked.limit)} that tensors may take of a GPU; the "
        f"nearest is {layout_text(choice)}, which needs {memory_text(memory.total)}, {memory_text(over)} too many; "
        f"use {listing(ways)}"
    )


def nearest(asked: Asked, gpus: int) -> tuple[Choice, Memory] | None:
    """Find the layout that needs least memory, and the memory of its fullest rank; None if no layout can run.

    The MAX_WALKS layouts with the least estimates are walked through; fewer, if all others are estimated to need more.
    """
    space, least, walks = Space(asked.config, gpus, asked.timer, asked.pins, asked.offload), inf, 0
    found: tuple[Choice, Memory] | None = None
    estimated: list[tuple[float, Choice]] = []
    for shape in space.shapes(inf):
        for pipeline in space.pipelines(shape.choice):
            layouts = [choice for _, choice in space.layouts(shape, pipeline)]
            estimated += zip(space.estimate.memories(layouts), layouts, strict=True)
    heapify(estimated)
    while estimated and walks < MAX_WALKS:
        needed, choice = heappop(estimated)
        if needed >= least:
            break
        try:
            memory = fullest_rank(check(asked.applied(choice), gpus), asked.timer)
        except InputError:
            continue
        walks += 1
        if memory.total < least:
            least, found = memory.total, (choice, memory)
    return found


def _refusal(asked: Asked, gpus: int) -> str:
    """Describe what is wrong with the first layout that cannot run."""
    space = Space(asked.config, gpus, asked.timer, asked.pins, asked.offload)
    for shape in space.shapes(inf):
        for pipeline in space.pipelines(shape.choice):
            for _, choice in space.layouts(shape, pipeline):
                try:
                    asked.predict(check(asked.applied(choice), gpus))
                except InputError as error:
                    return "; ".join(map(str, error.problems)) or str(error)
    return "no reason is known"


def _enough(asked: Asked, gpus: int) -> int | None:
    """The first double of `gpus` on which a layout fits."""
    doubles = (gpus << power for power in range(1, MAX_GPU_FACTOR.bit_length()))
    return next((count for count in doubles if asked.search(count, 1).results), None)


def _possible(asked: Asked, gpus: int, pins: Mapping[str, Any]) -> bool:
    """Return whether there is a layout with these pins, whatever memory it needs."""
    space = Space(asked.config, gpus, asked.timer, pins, asked.offload)
    shapes = (shape for shape in space.shapes(inf) if space.sharings(shape))
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

    needed = list(asked.pins)  # some keys that contradict each other: without any one of them there is a layout
    for key in asked.pins:
        fewer = [each for each in needed if each != key]
        if not _possible(asked, gpus, {each: asked.pins[each] for each in fewer}):
            needed = fewer
    heads = f"heads = {model.heads}, kv_heads = {model.kv_heads}"
    heads += f", experts.count = {model.experts.count}" if model.experts else ""
    rule = (
        f"their products must divide {gpus:,} GPUs, data-parallel ranks times batch.micro must divide batch.global = "
        f"{batch.global_:,}, and the model has {heads} and layers = {model.layers}, of which "
        "a search gives every pipeline stage one"
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
