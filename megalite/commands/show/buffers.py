"""Rows of tokens at experts that ranks share out, with both kinds of buffers: how many, kept bytes, and sent bytes."""

from dataclasses import replace
from typing import get_args

from rich.table import Table

from megalite.base.terminal import table
from megalite.config.layers import layer_kinds
from megalite.config.parallel_schema import Buffers, ExpertParallel
from megalite.config.schema import Config
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.sizes import Sizes
from megalite_launch.base.texts import memory_text

ROW_MOMENTS = ("gate and up", "swiglu", "down")  # moments of backward that need tensors of rows


def expert_buffers(config: Config) -> Table:
    """A row for each kind of buffers: of one layer and micro-batch, on one rank."""
    shown = table("buffers", "rows", "kept for backward", "sent forward and backward", text=("buffers",))
    for buffers in get_args(Buffers):
        style = "bold" if config.parallel.experts.buffers == buffers else None
        shown.add_row(buffers, *_facts(config, buffers), style=style)
    return shown


def _facts(config: Config, buffers: Buffers) -> tuple[str, str, str]:
    sizes = Sizes(replace(config, parallel=replace(config.parallel, experts=ExpertParallel(buffers))))
    mixture = next(kind.mixture for kind in layer_kinds(config.model) if kind.mixture is not None)
    part = ExpertsPart(config.model.width, mixture)
    kept = sum(each.bytes for each in part.kept(sizes) if each.until in ROW_MOMENTS and not each.recipe)
    forward = part.forward_transfers(sizes, 0, "forward") + part.output_transfers(sizes, "forward")
    passed = forward + part.backward_transfers(sizes, 0)
    whole = sum(times * transfer.bytes for (transfer, _), times in passed.items() if transfer.axis == "ep")
    ep = config.parallel.ep
    return f"{part.room(sizes):,}", memory_text(kept), memory_text(whole * (ep - 1) // ep)
