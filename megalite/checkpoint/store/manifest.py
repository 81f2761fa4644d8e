"""The manifest of a checkpoint: what the checkpoint is, and every file's size and hash. Imports no torch.

A checkpoint is a folder named `step-XXXXXXXX`. It is written under another name, and renamed when its manifest, the
last of its files, is on the disk. So a folder of that name was complete once, and its manifest tells whether it still
is.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import xxhash

from megalite.base.errors import InputError, Problem, listing
from megalite.base.files import as_json
from megalite.base.json_bounds import parse
from megalite.base.json_shape import SECTION, TEXT, Each, OrNull, ValueKind, digits, misfits, whole
from megalite.checkpoint.store.disk import DamagedError, File, check_size, read_whole
from megalite.config.convert import from_plain, keys, to_plain
from megalite.config.layout import AXES
from megalite.config.rules.model import model_rules
from megalite.config.rules.ranges import range_rules
from megalite.config.schema import Config

FORMAT = 2
FORMAT_WITHOUT_INDEX = 1  # the format before
STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")  # eight digits or more, fewer than an int64 has
MANIFEST = "manifest.json"
INDEX = "index.bin"  # where tensors lie; see megalite.checkpoint.store.index
MAX_MANIFEST_BYTES = 1 << 24  # bytes of a manifest; one of 16,384 ranks has 2 MB
FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
LISTED_KEYS = 5  # names in a message


class OldFormatError(InputError):
    """A checkpoint has a format that this megalite reads only to bring the checkpoint up to date."""


@dataclass(frozen=True)
class Source:
    """A source of the training data, as the run that saved found it."""

    path: str
    weight: float
    tokens: int
    fingerprint: str  # hash of the content, wherever it lies


@dataclass(frozen=True)
class Manifest:
    """The fields of a manifest. None stands for what is unknown of a checkpoint that another program has saved."""

    step: int
    tokens: int | None  # trained on so far
    saved: str  # when, in ISO 8601
    ranks: int | None
    layout: dict[str, int] | None
    versions: dict[str, str]
    config: dict[str, Any]  # under the names that YAML uses
    data: tuple[Source, ...]
    files: dict[str, File]

    def render(self) -> str:
        """The text of manifest.json. Its digest covers all other fields, in every format."""
        fields = {"format": FORMAT, **asdict(self)}
        return as_json({**fields, "digest": _digest(fields)})

    @staticmethod
    def read(path: Path, format: int = FORMAT) -> "Manifest":
        """The manifest of the checkpoint `path`, all of it valid.

        Raises DamagedError if it is not as it was written or makes no sense, InputError for another format.
        """
        return Manifest.parse(path, read_whole(path, MANIFEST, MAX_MANIFEST_BYTES), format)

    @staticmethod
    def parse(path: Path, text: bytes, format: int = FORMAT) -> "Manifest":
        """Parse the text of the manifest of the checkpoint `path`; raises as `read` does."""
        fields = _intact(path, text)
        _refuse_other_format(path, fields, format)
        if problem := next(misfits(fields, FIELDS, MANIFEST), None) or _unfit(fields, format):
            raise DamagedError(path, problem)
        if STEP_NAME.fullmatch(name := path.absolute().name) and step_of(path) != fields["step"]:
            raise DamagedError(path, f"{MANIFEST} is of step {fields['step']}, not of {name}")
        data = tuple(Source(**source) for source in fields.pop("data"))
        files = {name: File(**file) for name, file in fields.pop("files").items()}
        return Manifest(**fields, data=data, files=files)

    @property
    def foreign(self) -> bool:
        """Flag: another program has saved the weights."""
        return self.layout is None

    @property
    def resumable(self) -> bool:
        """Flag: there are an optimizer's states and the progress of a run, too."""
        return self.tokens is not None

    @property
    def configuration(self) -> Config:
        """The configuration of the run that saved. Keys that this megalite does not know are left out."""
        return from_plain(_known(self.config))[0]


def complete(folder: Path) -> list[Path]:
    """The paths in `folder` with the name of a checkpoint, oldest first. Raises InputError if `folder` is no folder."""
    try:
        return sorted((path for path in folder.iterdir() if STEP_NAME.fullmatch(path.name)), key=step_of)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}; a folder of checkpoints is expected") from error


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.absolute().name.removeprefix("step-"))


def check_sizes(path: Path) -> Manifest:
    """The manifest of a checkpoint, after a check that all files are there in full size. Raises DamagedError."""
    manifest = Manifest.read(path)
    for name, file in manifest.files.items():
        check_size(path, name, file)
    return manifest


def is_plain(name: str) -> bool:
    """Return whether `name` can be a file of a checkpoint: on every system, it lies in the checkpoint's folder."""
    return FILE_NAME.fullmatch(name) is not None and name not in (".", "..")


def _intact(path: Path, text: bytes) -> dict[str, Any]:
    """The fields of a manifest without its digest. Raises DamagedError unless that covers them."""
    try:
        fields = parse(text, unique=True)
        digest = fields.pop("digest")
        # To the byte: a changed blank between two fields is not overlooked either.
        intact = digest == _digest(fields) and text == as_json({**fields, "digest": digest}).encode()
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # no JSON, no object, none that we write
        intact = False
    if not intact:
        raise DamagedError(path, f"{MANIFEST} is damaged")
    return fields


def _refuse_other_format(path: Path, fields: dict[str, Any], format: int) -> None:
    """Take the format out of `fields`. Raises InputError for another format, and for fields of a later one."""
    if type(found := fields.pop("format", None)) is not int or found < 1:
        raise DamagedError(path, f"{MANIFEST} has no format")
    unknown = [shortened(key) for key in fields if key not in FIELDS][:LISTED_KEYS]
    if found != format or unknown:
        told = f"{path / MANIFEST}: has format {found}; this megalite reads format {format}"
        told += f" and does not know {listing(unknown, 'and')}" if unknown else ""
        if found < format:
            raise OldFormatError(f"{told}; bring it up to date with `megalite-inspect-checkpoint index {path}`")
        raise InputError(told)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).astimezone(UTC) is not None
    except (ValueError, OverflowError):
        return False


COUNT, SIZE, HASH = whole(0, 63), whole(1, 31), digits(32)
WEIGHT = ValueKind("a number above 0", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max)
TIME = ValueKind("a time in ISO 8601", _is_time)
FIELDS = {  # beside `format`
    "step": COUNT,
    "tokens": OrNull(COUNT),
    "saved": TIME,
    "ranks": OrNull(SIZE),
    "layout": OrNull(dict.fromkeys(AXES, SIZE)),
    "versions": Each(TEXT),
    "config": SECTION,
    "data": [{"path": TEXT, "weight": WEIGHT, "tokens": COUNT, "fingerprint": TEXT}],
    "files": Each({"bytes": COUNT, "xxh128": HASH}),
}


def _unfit(fields: dict[str, Any], format: int) -> str | None:
    """A contradiction between fields each of which is well-formed."""
    for name in fields["files"]:
        if not is_plain(name) or name == MANIFEST:
            return f"{MANIFEST}: files: {shortened(name)} is no name of a file of a checkpoint"
    if format == FORMAT and INDEX not in fields["files"]:
        return f"{MANIFEST}: files: {INDEX} is not among them"
    if (fields["ranks"] is None) != (fields["layout"] is None):
        return f"{MANIFEST}: of ranks and layout, only one is null"
    if fields["tokens"] is None and fields["layout"] is not None:
        return f"{MANIFEST}: tokens is null, though megalite has saved the checkpoint"
    for problem in config_problems(fields["config"]):
        return f"{MANIFEST}: config: {problem.key} = {shortened(problem.value)}: {problem.rule}"
    return None


def config_problems(plain: dict[str, Any]) -> Iterator[Problem]:
    """Problems of a configuration's types, or if there are none of its model."""
    config, problems = from_plain(_known(plain))
    yield from problems
    if not problems:
        yield from range_rules(to_plain(replace(Config(), model=config.model)))
        yield from model_rules(config.model)


def _known(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A section of a configuration without the keys that this megalite does not know."""
    return {
        name: _known(value, f"{prefix}{name}.")
        if isinstance(value, dict)
        else [_known(item, f"{prefix}{name}[].") if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in section.items()
        if f"{prefix}{name}" in keys()
    }


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
