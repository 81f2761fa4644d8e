"""One case in this process: starts its ranks if it has several, and writes exactly one row, however that goes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import find_rank_info
from megalite.distributed.start.start import run_rank
from megalite_tools.bench.training.cases import COMMON_SETTINGS, Case, Target
from megalite_tools.bench.training.end_to_end import measure as measure_train
from megalite_tools.bench.training.rows import CRASH, OK, Rows
from megalite_tools.bench.training.trial import Note, measure, outcome, settings, versions

MODULE = "megalite_tools.bench.training.command"
STEPS = 12  # `megalite train` takes so many before it is resumed


def run_one(case: Case, target: Target, folder: Path, arguments: Sequence[str]) -> int:
    """Run a case and write its row. Returns the exit code. Raises InputError for a program, which has no row.

    arguments: the command line of this process, with which further ranks are started.
    """
    rows = Rows(folder / "rows")
    if case.command:
        raise InputError(f"{case.id}: is a program; `run --cases {case.id}` runs it")
    if case.train:
        _write(case, rows, lambda note: _train(case, target, folder, note), 0)
        return ExitCode.DONE
    rank_info = find_rank_info()
    if case.ranks > 1 and rank_info is None:
        return launch(MODULE, arguments, case.ranks)

    def work() -> int:
        rank = rank_info.rank if rank_info else 0
        _write(case, rows, lambda note: measure(case, target, rank_info, note, folder / "traces"), rank)
        return ExitCode.DONE

    if rank_info is not None:
        return run_rank(work, rank_info)
    try:
        return work()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _write(case: Case, rows: Rows, work: Callable[[Note], dict[str, Any]], rank: int) -> None:
    """Do the work, and write its row on rank 0. Errors that are no result are raised again."""
    known: dict[str, Any] = {}

    def note(row: Mapping[str, Any]) -> None:
        known.update(row)
        if rank == 0:
            rows.note(case.id, {"id": case.id, **known})

    try:
        row = work(note)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised again unless it is a result
        if known.get("status") == OK:  # all that a table needs is there
            reason = f"then: {type(error).__name__} while {known.get('stage')}: {str(error)[:500]}"
            row = {**known, "note": reason}
        else:
            row = {**known, **outcome(error, known)}
    if rank == 0:
        rows.write(case.id, {"id": case.id, **row})


def _train(case: Case, target: Target, folder: Path, note: Note) -> dict[str, Any]:
    head = {"settings": settings(case.config(target.device)), "versions": versions()}

    def noted(known: Mapping[str, Any]) -> None:
        note({"status": CRASH, "stage": "training end to end", **head, **known})

    noted({})
    work = folder / "train"
    shutil.rmtree(work, ignore_errors=True)  # an attempt that was killed has left it
    found = measure_train((*COMMON_SETTINGS, *case.inputs), work, target.device, STEPS, noted)
    shutil.rmtree(work, ignore_errors=True)
    return {"status": OK, **head, **found}
