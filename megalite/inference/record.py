"""Adds results to the metrics of the run that the model is of."""

from collections.abc import Mapping
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import is_file
from megalite.base.output import append
from megalite.train.folder.lock import Lock
from megalite.train.folder.records import line_of, restore_end


def add_record(run: Path, step: int, values: Mapping[str, float]) -> bool:
    """Add a record to a run's `metrics.jsonl`. Returns whether it has that file. Raises InputError while a job runs."""
    path = run / "metrics.jsonl"
    if not is_file(path):
        return False
    lock = Lock.take(run)
    try:
        restore_end(path)
        append(path, line_of(step, values))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        lock.free()
    return True
