"""Draws how evenly tokens chose the experts of a run: every expert of every layer, from step to step."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.plan.routing import IN_TURN
from megalite.report.picture import colours, in_legend
from megalite.report.pictures import plain, pyplot, save
from megalite.train.folder.records import RETURN_EVENTS, read_lines

EVENT = "expert_load"
DOUBLINGS = 3  # from an even share, at which the colours end


class Loads(NamedTuple):
    """steps: at which loads were told. layers: with experts. shares: `[steps, layers, experts]`, of an even share.
    in_turn: whether tokens took experts in turn, whatever routers said.
    """

    steps: list[int]
    layers: list[int]
    shares: NDArray[np.float64]
    in_turn: bool = False


def read_loads(path: Path) -> Loads:
    """The loads in a run's `metrics.jsonl`. Raises InputError if there are none, or if they make no table."""
    found, in_turn = dict[int, dict[str, Any]](), False
    for line in read_lines(path):
        if line.get("event") == EVENT:
            found[line["step"]] = line
        elif line.get("event") == IN_TURN:
            in_turn = True
        elif line.get("event") in RETURN_EVENTS:
            found = {step: load for step, load in found.items() if step <= line["step"]}
    if not found:
        raise InputError(f"{path}: tells no loads of experts: its model has none, or no step was reported yet")
    steps = sorted(found)
    try:
        loads = np.array([found[step]["load"] for step in steps], np.float64)
        layers = [int(layer) for layer in found[steps[-1]]["layers"]]
        if loads.ndim != 3 or loads.shape[1] != len(layers) or not (loads >= 0).all() or not loads.sum(2).all():
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: its {EVENT} lines are not what megalite writes") from None
    return Loads(steps, layers, loads * loads.shape[2] / loads.sum(2, keepdims=True), in_turn)


def draw_loads(run: Path, out: Path) -> None:
    """Draw the loads of `run` as a picture: experts as rows, coloured by their share; below, the largest by layer."""
    steps, layers, shares, in_turn = read_loads(run / "metrics.jsonl")
    count = shares.shape[2]
    figure, (rows, most) = pyplot.subplots(2, 1, figsize=(8, 7), height_ratios=(4, 1.4), layout="constrained")
    doublings = np.log2(np.maximum(shares, 2.0 ** -(DOUBLINGS + 1))).reshape(len(steps), -1).T
    edges = np.concatenate(([0], (np.array(steps[1:]) + np.array(steps[:-1])) / 2, [steps[-1]]))
    mesh = rows.pcolormesh(
        edges, np.arange(len(doublings) + 1), doublings, cmap="RdBu_r", vmin=-DOUBLINGS, vmax=DOUBLINGS, rasterized=True
    )
    named = sorted(in_legend(len(layers)))
    rows.set_yticks([(at + 0.5) * count for at in named], [f"layer {layers[at]}" for at in named])
    rows.tick_params(axis="y", length=0)
    for at in range(1, len(layers)):
        rows.axhline(at * count, color="black", linewidth=0.5)
    rows.invert_yaxis()
    told = ", taken in turn" if in_turn else ""
    rows.set_title(f"{plain(run.resolve().name)}: {count} experts in each of {len(layers)} layers{told}")
    ticks = range(-DOUBLINGS, DOUBLINGS + 1)
    labels = [f"{2.0**at:g}" for at in ticks]
    bar = figure.colorbar(mesh, ax=rows, ticks=list(ticks), label="tokens, of an even share", extend="both")
    bar.ax.set_yticklabels(labels)
    for at, (layer, colour) in enumerate(zip(layers, colours(len(layers)), strict=True)):
        label = f"layer {layer}" if at in named else None
        most.plot(steps, shares[:, at].max(1), color=colour, linewidth=1, label=label)
    most.set_xlim(0, steps[-1])
    most.set_xlabel("step")
    most.set_ylabel("fullest expert,\nof an even share")
    most.grid(alpha=0.3)
    most.legend(loc="upper right", ncols=2, framealpha=0.9, edgecolor="none", fontsize=8)
    save(figure, out)
