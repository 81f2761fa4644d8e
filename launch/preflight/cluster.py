"""The figures of a preflight for the planner: what a cluster file says of speeds, as it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Optional

from ..base.errors import UserError
from .compare import Verdict
from .findings import number
from .gpus import gpu_values
from .thresholds import Thresholds
from .trainer import Trainer, TrainerError

PROGRAM = "megalite.cost.measured_cluster"
MIN_SPREAD_GPUS = 8  # GPUs from which on a spread is told, within a quarter of it; of fewer it could be anything


def figures(verdict: Verdict) -> dict[str, Any]:
    """Summarize the nodes that are fine: GPUs per node, median bytes/s and FLOP/s, and the spread of products.

    Raises UserError.
    """
    sheets = [verdict.sheets[node] for node in verdict.ok]
    products = [value for sheet in sheets for _, value in gpu_values(sheet.measured, "matmul")]
    if not products:
        raise UserError("--write-cluster: no node that is fine has measured anything; run it with --full")
    gpus = round(median(len(gpu_values(sheet.measured, "matmul")) for sheet in sheets if "gpus" in sheet.measured))
    copies = [
        min(rates)
        for sheet in sheets
        for rates in zip(*([v for _, v in gpu_values(sheet.measured, key)] for key in ("to_device", "to_host")))
    ]
    reduced = [rate for rate in (number(sheet.measured, "all_reduce") for sheet in sheets) if rate]
    pairs = [
        pair["rate"] / pair["ranks"]
        for sheet in sheets
        for pair in sheet.measured.get("pairs", ())
        if number(pair, "rate") and number(pair, "ranks")
    ]
    on_gpus = sheets[0].gpu != "cpu"
    return {
        "nodes": len(sheets),
        "gpus": gpus,
        "precision": "bf16" if on_gpus else "fp32",
        "matmul": median(products),
        "spread": stdev(products) / mean(products) if on_gpus and len(products) >= MIN_SPREAD_GPUS else None,
        "host": median(copies) if copies else None,
        "node": median(reduced) if reduced and gpus > 1 else None,
        "network": median(pairs) if pairs else None,
    }


def check_target(out: Path) -> None:
    """Raises UserError if no cluster file can be written there."""
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--write-cluster {out}: must end in .yaml")
    if out.exists():
        raise UserError(f"--write-cluster {out}: there is such a file already; give another name")
    if not out.parent.is_dir():
        raise UserError(f"--write-cluster {out}: there is no folder {out.parent}")


def write_cluster(verdict: Verdict, out: Path, base: Optional[str], thresholds: Thresholds, trainer: Trainer) -> None:
    """Write the cluster file `base` with the figures that were measured in place of its own. Raises UserError."""
    found = figures(verdict)
    gpu = verdict.sheets[verdict.ok[0]].gpu
    base = base or thresholds.of(gpu).text("cluster")
    if base is None:
        raise UserError(f"--write-cluster: no cluster file is known for {gpu}; name one like it with --cluster")
    try:
        trainer.ask(PROGRAM, [base, str(out)], 60.0, json.dumps(found))
    except TrainerError as error:
        raise UserError(f"--write-cluster {out}: {error}") from None
