"""A plan of measurements, read from a YAML file. Imports no torch.

A plan has `models` (a name, and the configuration files and overrides that make it) and `cases`. Keys of a case:

    id              names its row
    implementation  of a training step: megalite, transformers, liger or torchtitan
    tuned           of another program: with the settings that serve it best, see `peers`; else as it is shipped
    selective       of torchtitan: its own selective recompute of operations, which it ships with
    model, inputs   a model of the plan, and overrides as `megalite train` takes them
    train           `megalite train` itself is run, with its loader, reports, saves and a resume
    command         a program to run instead, as a list of words; {folder} is the work folder
    keep            files in {folder} that the command writes and that are kept
    ranks           processes, each with a GPU of its own; 1 unless given
    part            of the plan, so that a plan can be run in several calls; 1 unless given
    limit           seconds after which the case is ended
    value           cases of greater value are started first; equals in the order of the plan
    trace           whether a trace of two steps is kept

`tiny` beside a model's inputs or a command is what stands in for it in a rehearsal on a CPU.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megalite.base.errors import InputError, counted, listing
from megalite.base.json_shape import TEXT, Each, OrNull, ValueKind, misfits
from megalite.config.identity import digest_of
from megalite.config.load import dump, files_and_overrides, load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.config.yaml import read_mapping
from megalite.plan.pipeline import micro_batches

Device = Literal["cpu", "cuda"]

MEGALITE = "megalite"
IMPLEMENTATIONS = (MEGALITE, "transformers", "liger", "torchtitan")
ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
COMMON_SETTINGS = (  # inputs of every case: settings that all implementations share
    "train.precision=bf16",
    "schedule.name=constant",
    "optim.lr=1e-4",
    "optim.clip_norm=1.0",
)
REHEARSAL = "model.sequence_length=64"  # a rehearsal's sequences, whatever the plan says
REHEARSAL_LIMIT = 90.0  # seconds of any training step of a rehearsal, which compiles on a CPU
REHEARSAL_RANKS = 2  # at most


@dataclass(frozen=True)
class Target:
    """Device that cases run on: GPUs, or a CPU with tiny cases, to rehearse a plan."""

    device: Device
    tiny: bool


@dataclass(frozen=True)
class Case:
    """One measurement; the keys of a plan are in the docstring of this file."""

    id: str
    implementation: str = ""
    tuned: bool = False
    selective: bool = False
    model: str = ""
    inputs: tuple[str, ...] = ()
    train: bool = False
    command: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    ranks: int = 1
    part: int = 1
    limit: float = 60.0
    value: float = 0.0
    trace: bool = False

    @property
    def label(self) -> str:
        """The name of what is given up together when it fails again and again."""
        if not self.implementation:
            return self.id
        compiled = self.config("cpu").train.compile
        return ", ".join([self.implementation, *["tuned"] * self.tuned, *["compiled"] * compiled])

    def group(self, target: Target) -> str:
        """The name of the cases whose losses must be the same: model, batch, ranks, precision, device."""
        config = self.config(target.device)
        batch = f"{config.batch.micro_size} x {micro_batches(config)}"
        return f"{self.model}, batch {batch}, {counted(self.ranks, 'rank')}, {config.train.precision}, {target.device}"

    def config(self, device: str) -> Config:
        """The checked configuration of a training step, on a CPU without CUDA graphs. Raises InputError."""
        ungraphed = ["train.cuda_graph=false"] if device == "cpu" else []
        return _checked((*COMMON_SETTINGS, *self.inputs, *ungraphed, f"run.device={device}"), self.ranks)

    def hash(self, target: Target) -> str:
        """Tells whether a row is of this very case: a digest of all that decides what is measured."""
        told: dict[str, Any] = {**asdict(self), **asdict(target), "limit": 0, "value": 0, "part": 0}
        if self.implementation or self.train:
            told["config"] = dump(self.config(target.device))
        return digest_of(json.dumps(told, sort_keys=True), 16)


@cache
def _checked(inputs: tuple[str, ...], ranks: int) -> Config:
    return check(load(*files_and_overrides(inputs)), world_size=ranks)


TEXTS = ValueKind(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
COMMAND = ValueKind(
    "a list of texts, the first a program", lambda value: TEXTS.holds(value) and bool(value and value[0])
)
LIMIT = ValueKind("a number of seconds above 0", lambda value: type(value) in (int, float) and 0 < value < 1e6)
NUMBER = ValueKind("a number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < 1e6)
COUNT = ValueKind("a whole number from 1 to 1024", lambda value: type(value) is int and 1 <= value <= 1024)
FLAG = ValueKind("true or false", lambda value: type(value) is bool)
MODEL = {"inputs": TEXTS, "tiny": TEXTS}
CASE = {
    "id": ValueKind(
        "at most 80 of a-z, 0-9, '.', '_' and '-'", lambda value: isinstance(value, str) and bool(ID.fullmatch(value))
    ),
    "implementation": TEXT,
    "tuned": FLAG,
    "selective": FLAG,
    "model": TEXT,
    "inputs": TEXTS,
    "train": FLAG,
    "command": OrNull(COMMAND),
    "tiny": OrNull(COMMAND),
    "keep": TEXTS,
    "ranks": COUNT,
    "part": COUNT,
    "limit": LIMIT,
    "value": NUMBER,
    "trace": FLAG,
}
DEFAULTS: dict[str, Any] = {**asdict(Case("")), "inputs": [], "keep": [], "command": None, "tiny": None}


def read_plan(path: Path, target: Target) -> list[Case]:
    """The cases of a plan, most valuable first. Raises InputError for a file that is none."""
    fields = read_mapping(path)
    models, listed = fields.get("models") or {}, fields.get("cases")
    if unknown := sorted(set(fields) - {"models", "cases"}):
        raise InputError(f"{path}: {unknown[0]!r:.100} is no key of a plan; known are models and cases")
    if problem := next(misfits({"models": models}, {"models": Each(MODEL)}, str(path)), None):
        raise InputError(problem)
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: cases must be a list of at least one case")
    cases = [_case(fields, models, f"{path}: cases[{number}]", target) for number, fields in enumerate(listed)]
    twice = [name for name, times in Counter(case.id for case in cases).items() if times > 1]
    if twice:
        raise InputError(f"{path}: {twice[0]} is the id of two cases; give each its own")
    return sorted(cases, key=lambda case: -case.value)


def _case(fields: Any, models: Mapping[str, Mapping[str, Sequence[str]]], where: str, target: Target) -> Case:
    if not isinstance(fields, dict):
        raise InputError(f"{where}: must be a mapping")
    if problem := next(misfits({**DEFAULTS, **fields}, CASE, where), None):
        raise InputError(problem)
    fields = {key: value for key, value in {**DEFAULTS, **fields}.items() if value is not None}
    tiny = fields.pop("tiny", None)
    kinds = [key for key in ("implementation", "train", "command") if fields.get(key)]
    if len(kinds) != 1:
        raise InputError(f"{where}: must have one of implementation, train and command, and has {len(kinds)}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    case = Case(**values)
    if case.command:
        return replace(case, command=tuple(tiny)) if target.tiny and tiny is not None else case
    if case.implementation and case.implementation not in IMPLEMENTATIONS:
        raise InputError(f"{where}: implementation = {case.implementation!r:.60}: must be {listing(IMPLEMENTATIONS)}")
    if case.selective and case.implementation != "torchtitan":
        raise InputError(f"{where}: selective: is of torchtitan; others have train.recompute among their inputs")
    if case.model not in models:
        raise InputError(
            f"{where}: model = {case.model!r:.60}: the plan's models are {listing(list(models)) or 'none'}"
        )
    known = models[case.model]
    of_model = [*known["tiny"], REHEARSAL] if target.tiny else [*known["inputs"]]
    case = replace(case, inputs=(*of_model, *case.inputs))
    if target.tiny:
        case = replace(case, limit=REHEARSAL_LIMIT, ranks=min(case.ranks, REHEARSAL_RANKS))
    try:
        case.config(target.device)
    except InputError as error:
        raise InputError(f"{where}: {case.id}: {error}") from error
    return case
