"""`results.csv`: a row for every run of an experiment, of what it has written. docs/scaling.md lists the columns."""

import csv
from collections.abc import Mapping, Sequence
from math import floor, isfinite
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, is_file, read_object, write_whole
from megalite.experiment.cell import Cell, Counts
from megalite.experiment.cost import MeasuredStep
from megalite.experiment.expand import Expanded
from megalite.experiment.folder import (
    EVAL_PREFIX,
    MAX_STATUS_BYTES,
    NUMBERS,
    ExperimentFolder,
    Status,
    cell_text,
    csv_text,
)
from megalite.plan.model.size import flops_per_token
from megalite.train.folder.records import WARM_UP_STEPS, read_records

FIRST_COLUMNS = ("id", "slug", "kind", "rung")
RESULT_COLUMNS = (*NUMBERS, "status", "commit")
LOSS_SHARE = 0.01  # share of the steps whose mean is the training loss
Row = dict[str, Any]


def collect(expanded: Expanded, known: Mapping[str, tuple[Status, int]]) -> list[Row]:
    """Write `results.csv`. Returns its rows, in the order of the experiment. known: by id, each with its last step."""
    folder = ExperimentFolder(expanded.setup.folder)
    systems = expanded.setup.experiment.measure
    warm_up = WARM_UP_STEPS if systems is None else systems.warmup
    rows = [row_of(cell, *known[cell.id], folder.run(cell.name), warm_up) for cell in expanded.cells]
    tasks = dict.fromkeys(name for row in rows for name in row if name.startswith(EVAL_PREFIX))
    columns = (*FIRST_COLUMNS, *expanded.axes, *RESULT_COLUMNS, *tasks)
    write_whole(folder.results, csv_text([columns, *([cell_text(row.get(name)) for name in columns] for row in rows)]))
    return rows


def runs_are_elsewhere(folder: ExperimentFolder) -> bool:
    """Return whether `results.csv` is all that is left of finished runs, so that it must not be made anew.

    It is so where people have copied the experiment without `runs/`, or have deleted that.
    """
    if exists(folder.runs) or not is_file(folder.results):
        return False
    try:
        with folder.results.open(encoding="utf-8", newline="") as file:
            return any(row.get("status") == "done" for row in csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        return False


def row_of(cell: Cell, status: Status, step: int, run: Path, warm_up: int = WARM_UP_STEPS) -> Row:
    """The row of one run; what is not known is None."""
    counts = Counts.of(cell.config.model)
    full, causal = cell.flops
    row: Row = {
        "id": cell.id,
        "slug": cell.name.removesuffix(f"-{cell.id}"),
        "kind": cell.kind,
        "rung": cell.rung,
        **cell.axes,
        "seed": cell.seed,
        "n_total": counts.total,
        "n_with_head": counts.with_head,
        "n_non_embedding": counts.non_embedding,
        "tokens": cell.tokens,
        "flops_full": full,
        "flops_causal": causal,
        "steps": cell.steps,
        "sequence_length": cell.config.model.sequence_length,
        "batch_global": cell.config.batch.global_,
        "gpus": cell.gpus,
        "status": status.state,
    }
    try:
        records = read_records(run / "metrics.jsonl") if step else []
    except InputError:
        records = []
    tasks = {name: value for record in records for name, value in record.items() if name.startswith(EVAL_PREFIX)}
    return row | _losses(records, cell) | _speed(records, cell, warm_up) | {"commit": _commit(run)} | tasks


def _losses(records: Sequence[Row], cell: Cell) -> Row:
    """Losses at the end; None where a run has not come there."""
    trained = [record for record in records if record.get("loss") is not None]
    evaluated = [record for record in records if record.get("valid_loss") is not None]
    last = trained[-1]["step"] if trained else 0
    found: Row = {
        "loss_valid": evaluated[-1]["valid_loss"] if evaluated and evaluated[-1]["step"] >= cell.steps else None
    }
    if last < cell.steps:
        return {**found, "loss_train": None}
    first = last - max(floor(LOSS_SHARE * cell.steps), 1)
    weights = _intervals(trained, cell.start)
    late = [(record["loss"], weight) for record, weight in zip(trained, weights, strict=True) if record["step"] > first]
    return {**found, "loss_train": sum(loss * weight for loss, weight in late) / sum(weight for _, weight in late)}


def _intervals(records: Sequence[Row], start: int) -> list[int]:
    """The steps that each record is the mean of."""
    before = [start, *(record["step"] for record in records)]
    return [max(record["step"] - step, 1) for record, step in zip(records, before, strict=False)]


def _speed(records: Sequence[Row], cell: Cell, warm_up: int) -> Row:
    """Tokens per second of a rank after the warm-up: the median, and the tenth and ninetieth percentile."""
    timed = [record for record in records if record.get("tokens_per_second") is not None]
    lengths = _intervals(timed, cell.start)
    begun = timed[0]["step"] - lengths[0] if timed else 0
    warm = [record for record, length in zip(timed, lengths, strict=True) if record["step"] - length >= begun + warm_up]
    rates = sorted(record["tokens_per_second"] / cell.gpus for record in warm)
    found: Row = dict.fromkeys(
        RESULT_COLUMNS[RESULT_COLUMNS.index("tokens_per_second_per_gpu") : RESULT_COLUMNS.index("status")]
    )
    seconds = [
        record["step_seconds"] * length
        for record, length in zip(timed, lengths, strict=True)
        if record.get("step_seconds") is not None
    ]
    memory = [size for record in timed if (size := record.get("peak_memory_bytes")) is not None and isfinite(size)]
    found |= {"seconds": sum(seconds) if seconds else None, "peak_memory_bytes": int(max(memory)) if memory else None}
    if not rates:
        return found
    cuts = quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else rates * 9
    found["tokens_per_second_per_gpu"] = median(rates)
    found["tokens_per_second_per_gpu_low"], found["tokens_per_second_per_gpu_high"] = cuts[0], cuts[-1]
    shares = [record["mfu"] for record in warm if record.get("mfu") is not None]
    if shares:
        model = cell.config.model
        found["mfu_causal"] = median(shares)
        found["mfu_full"] = median(shares) * flops_per_token(model, "full") / flops_per_token(model, "causal")
    return found


def _commit(run: Path) -> str | None:
    """The commit of the code that the latest start has run."""
    for path in sorted((run / "starts").glob("*.json"), reverse=True):
        try:
            found = read_object(path, MAX_STATUS_BYTES).get("commit")
        except InputError:
            continue
        return found if isinstance(found, str) else None
    return None


def measured(rows: Sequence[Row], expanded: Expanded, known: Mapping[str, tuple[Status, int]]) -> list[MeasuredStep]:
    """Measured times of runs that have begun, from which the times of others are estimated."""
    cells = {cell.id: cell for cell in expanded.cells}
    found = []
    for row in rows:
        rate, cell = row.get("tokens_per_second_per_gpu"), cells.get(row["id"])
        if rate and cell is not None:
            status = known[cell.id][0]
            whole = status.state == "done" and status.attempts == 1 and status.seconds > 0
            found.append(MeasuredStep.of(cell, rate, status.seconds if whole else None, cell.start))
    return found
