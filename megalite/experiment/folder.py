"""The folder of an experiment: its file, the folders of its runs, and what is known of each run.

Every run folder holds `run.yaml`, the configuration that it is started with, and `status.json`, which is replaced as a
whole. `index.csv` is made of them and can be made again at any time.
"""

import csv
import io
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from megalite.base.errors import InputError
from megalite.base.files import as_json, read_object, write_whole

State = Literal["planned", "submitted", "running", "done", "oom", "diverged", "timeout", "failed"]
STATES: tuple[State, ...] = get_args(State)
END_STATES: tuple[State, ...] = ("done", "oom", "diverged", "timeout", "failed")
RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}-(?P<id>[0-9a-f]{10})")
MAX_STATUS_BYTES = 1 << 20
INDEX = ("id", "name", "kind", "rung", "seed", "state", "step", "steps", "gpus", "attempts", "job", "seconds", "reason")
NUMBERS = (  # columns of results.csv
    "seed",
    "n_total",
    "n_with_head",
    "n_non_embedding",
    "tokens",
    "flops_full",
    "flops_causal",
    "steps",
    "sequence_length",
    "batch_global",
    "gpus",
    "loss_train",
    "loss_valid",
    "tokens_per_second_per_gpu",
    "tokens_per_second_per_gpu_low",
    "tokens_per_second_per_gpu_high",
    "mfu_full",
    "mfu_causal",
    "peak_memory_bytes",
    "seconds",
)
EVAL_PREFIX = "eval/"  # its columns of what megalite-evaluate has measured begin like this, as in metrics.jsonl


@dataclass(frozen=True)
class Status:
    """The recorded state of a run. The first fields identify the run and never change.

    parent, start: the run whose checkpoint of step `start` this one goes on from. since: when the state began, seconds
    since the epoch. attempts: how often the run was started. launch, place: a job array's file, and the task in it.
    """

    id: str
    name: str
    kind: str
    gpus: int
    steps: int
    seed: int = 0
    rung: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    start: int = 0
    evaluates: bool = False
    state: State = "planned"
    since: float = 0.0
    reason: str = ""
    code: int | None = None
    attempts: int = 0
    launch: str = ""
    place: int = 0
    job: str = ""
    seconds: float = 0.0

    def now(self, state: State, reason: str = "", **changes: Any) -> "Status":
        """The same run in another state, from now on."""
        return replace(self, state=state, since=time.time(), reason=reason, **changes)


@dataclass(frozen=True)
class ExperimentFolder:
    """The paths of an experiment."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def launches(self) -> Path:
        """A file for every job array."""
        return self.path / "launches"

    @property
    def index(self) -> Path:
        return self.path / "index.csv"

    @property
    def results(self) -> Path:
        return self.path / "results.csv"

    def names(self) -> dict[str, str]:
        """The names of all run folders, by id."""
        try:
            entries = sorted(entry.name for entry in self.runs.iterdir() if entry.is_dir())
        except OSError:
            return {}
        return {match["id"]: name for name in entries if (match := RUN_NAME.fullmatch(name))}

    def run(self, name: str) -> Path:
        return self.runs / name


def read_status(run: Path) -> Status | None:
    """Read the status of the run in a folder; None if there is none, or none that can be read."""
    try:
        found = read_object(run / "status.json", MAX_STATUS_BYTES)
    except InputError:
        return None
    return parse_status(found)


def parse_status(found: Mapping[str, Any]) -> Status | None:
    values = {}
    for each in fields(Status):
        if each.name in found:
            values[each.name] = found[each.name]
    try:
        status = Status(**values)
    except TypeError:
        return None
    right = all(_is(getattr(status, each.name), each.type) for each in fields(Status))
    return status if right and RUN_NAME.fullmatch(status.name) else None


def _is(value: Any, kind: Any) -> bool:
    if kind is State:
        return value in STATES
    if kind == Mapping[str, Any]:
        return isinstance(value, dict)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def write_status(run: Path, status: Status) -> None:
    """Replace `status.json`: whoever reads it sees the old one or the new one."""
    write_whole(run / "status.json", as_json(asdict(status)))


def write_index(folder: ExperimentFolder, known: Iterable[tuple[Status, int]], axes: Sequence[str]) -> None:
    """Write `index.csv`: a row a run. known: each with the step that it has reached."""
    rows = [INDEX + tuple(axes)]
    for status, step in known:
        values = {**asdict(status), "step": step, "seconds": f"{status.seconds:.1f}"}
        rows.append(tuple(values[name] for name in INDEX) + tuple(cell_text(status.axes.get(key)) for key in axes))
    write_whole(folder.index, csv_text(rows))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, as RFC 4180 has it but for the ends of lines."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def cell_text(value: Any) -> Any:
    """A value of a configuration as the text of a table: empty for nothing, JSON for lists and truth."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool | list | dict) else value
