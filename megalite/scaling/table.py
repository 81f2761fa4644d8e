"""`results.csv` of an experiment: one row for every run, and an empty cell for what is not known."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.base.errors import InputError, listing
from megalite.base.files import is_file
from megalite.config.yaml import read_text
from megalite.experiment.folder import EVAL_PREFIX, NUMBERS, STATES

MAX_BYTES, MAX_RUNS, MAX_NUMBER = 64 << 20, 100_000, 1e100
TEXTS = ("id", "slug", "kind", "rung", "status", "commit")
REQUIRED_COLUMNS = ("id", "slug", "status")


@dataclass(frozen=True)
class RunResult:
    """One row. numbers: by column, nan where the cell is empty. axes: what the experiment varied, by dotted key."""

    id: str
    slug: str
    kind: str
    rung: str
    status: str
    numbers: Mapping[str, float]
    axes: Mapping[str, float | str]
    measured: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of the run's folder in `runs/`."""
        return f"{self.slug}-{self.id}"

    def number(self, column: str) -> float:
        return self.numbers.get(column, math.nan)


@dataclass(frozen=True)
class Results:
    """All rows. axes: the columns that the experiment varied, in the order of the file."""

    runs: tuple[RunResult, ...]
    axes: tuple[str, ...]

    def done(self) -> list[RunResult]:
        return [run for run in self.runs if run.status == "done"]


def read_results(path: Path) -> Results:
    """The runs in a `results.csv`. Raises InputError for a file that is none, with the line and the column."""
    header, lines = read_csv(path)
    for name in REQUIRED_COLUMNS:
        if name not in header:
            raise InputError(f"{path}: has no column {name}; megalite-sweep collect writes the file anew")
    axes = tuple(name for name in header if name not in (*TEXTS, *NUMBERS) and not name.startswith(EVAL_PREFIX))
    runs = tuple(_run(path, number, line, axes) for number, line in lines)
    seen: dict[str, int] = {}
    for (number, _), run in zip(lines, runs, strict=True):
        if run.id in seen:
            raise InputError(
                f"{path}: line {number}: id = {run.id}: stands in line {seen[run.id]} too; a run has one row: "
                "megalite-sweep collect writes the file anew"
            )
        seen[run.id] = number
    return Results(runs, axes)


def read_csv(path: Path) -> tuple[Sequence[str], list[tuple[int, dict[str, str]]]]:
    """The names of columns, and for every row its line and its cells. Raises InputError for what is no such file."""
    if not is_file(path):
        raise InputError(f"{path}: is missing, or is not a regular file")
    try:
        text = read_text(path, MAX_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[tuple[int, dict[str, str]]] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header) or not all(header):
            raise InputError(f"{path}: the names of its columns in line 1 must be there, each once")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"{path}: line {reader.line_num}: has {len(cells)} cells where {len(header)} are named"
                )
            lines.append((reader.line_num, dict(zip(header, cells, strict=True))))
            if len(lines) > MAX_RUNS:
                raise InputError(f"{path}: has more than {MAX_RUNS:,} rows")
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: is no CSV: {error}") from None
    return header, lines


def number_in(path: Path, line: int, column: str, text: str) -> float:
    """The number in a cell; nan for an empty one, an infinity or a number from MAX_NUMBER up. Raises InputError for
    other text."""
    if not text.strip():
        return math.nan
    try:
        if "_" in text or not text.isascii():  # 1_000 and digits of other scripts are numbers to Python alone
            raise ValueError
        value = float(text)
    except ValueError:
        value = math.inf
        if text.strip().lower() not in ("inf", "-inf", "infinity", "-infinity"):
            raise InputError(f"{path}: line {line}: {column} = {text!r:.80}: must be a number, or empty") from None
    return value if abs(value) < MAX_NUMBER else math.nan


def _run(path: Path, line: int, cells: Mapping[str, str], axes: Sequence[str]) -> RunResult:
    status = cells["status"].strip()
    if status not in STATES:
        raise InputError(f"{path}: line {line}: status = {status!r:.80}: must be {listing(STATES)}")
    if not cells["id"].strip():
        raise InputError(f"{path}: line {line}: id is empty; every run has one")
    numbers = {name: number_in(path, line, name, cells[name]) for name in NUMBERS if name in cells}
    measured = {name: number_in(path, line, name, text) for name, text in cells.items() if name.startswith(EVAL_PREFIX)}
    texts = {name: cells.get(name, "").strip() for name in TEXTS}
    return RunResult(
        texts["id"],
        texts["slug"],
        texts["kind"],
        texts["rung"],
        status,
        numbers,
        {name: cell_value(cells[name]) for name in axes},
        measured,
    )


def cell_value(text: str) -> float | str:
    """The value of an axis in a cell: a number where the text is one."""
    try:
        value = float(text)
    except ValueError:
        return text.strip()
    return value if math.isfinite(value) else text.strip()
