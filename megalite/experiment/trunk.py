"""Budgets that share a trunk: with warm-up, stable rate and decay, a short run is the beginning of a long one, decayed.

The longest budget is the trunk, an ordinary run. It saves its state where the decay of each shorter budget begins, and
those branch off from there. So four doublings of the budget take 37 % fewer tokens (Hu et al. 2024, arXiv 2404.06395;
Hägele et al. 2024, arXiv 2405.18392). A branch is the same run as one trained from the beginning, and has its identity.
"""

from dataclasses import replace

from megalite.base.errors import listing
from megalite.config.convert import to_plain
from megalite.config.identity import run_id
from megalite.experiment.build import Builder
from megalite.experiment.cell import Cell
from megalite.experiment.settings import differing


def share_trunks(cells: list[Cell], builder: Builder) -> list[Cell]:
    """The cells with their trunks and branches. Takes note of budgets that can share none."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_stem(cell), []).append(cell)
    if len(groups) > 1 and all(len(group) == 1 for group in groups.values()) and len(builder.setup.budgets[1]) > 1:
        first, other = (next(iter(groups.values()))[0], _sibling(cells))
        keys = differing(first.plain, other.plain) if other is not None else []
        told = [key for key in keys if key not in ("train.steps", "schedule.decay")]
        rule = f"is shared by no two budgets, since {listing(told, 'and') or 'each has settings of its own'} differ"
        builder.wrong("trunk", rule, "leave trunk out, or have derive not depend on the budget")
        return cells
    found: dict[str, Cell] = {}
    for group in groups.values():
        found |= {cell.id: cell for cell in _branched(group)}
    return [found[cell.id] for cell in cells]


def _stem(cell: Cell) -> str:
    """Identify the configuration that all budgets of a trunk have in common."""
    plain = dict(cell.plain)
    plain["train"] = {**plain["train"], "steps": 0}
    plain["schedule"] = {**plain["schedule"], "decay": 0}
    return run_id(plain, keeps_layout=True)


def _sibling(cells: list[Cell]) -> Cell | None:
    """A cell that differs from the first in its budget."""
    first = cells[0]
    alike = (cell for cell in cells[1:] if (cell.rung, cell.axes, cell.seed) == (first.rung, first.axes, first.seed))
    return next(alike, None)


def _branched(group: list[Cell]) -> list[Cell]:
    """One trunk with its branches. A budget without a step of stable rate is trained from the beginning."""
    trunk = max(group, key=lambda cell: cell.steps)
    starts = {cell.id: cell.steps - (cell.config.schedule.decay or 0) for cell in group if cell is not trunk}
    stable = trunk.steps - (trunk.config.schedule.decay or 0)
    least = trunk.config.schedule.warmup
    starts = {id_: step for id_, step in starts.items() if max(least, 1) <= step <= stable}
    saved = sorted(set(starts.values()))
    config = replace(trunk.config, checkpoint=replace(trunk.config.checkpoint, at=saved))
    branches = [
        replace(cell, parent=trunk.id, start=starts[cell.id]) if cell.id in starts else cell
        for cell in group
        if cell is not trunk
    ]
    return [replace(trunk, config=config, plain=to_plain(config)), *branches]
