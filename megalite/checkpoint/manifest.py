"""The manifest of a checkpoint: what it is, and every file's size and hash. Imports no torch.

A checkpoint is a folder named `step-XXXXXXXX`. It is written under another name and renamed when its manifest, the
last of its files, is on the disk: a folder of that name was complete once, and its manifest tells whether it still is.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megalite.config.convert import from_plain
from megalite.config.errors import InputError
from megalite.config.schema import Config

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
MANIFEST = "manifest.json"
BLOCK = 1 << 20  # bytes hashed at a time: what a cache holds


class DamagedError(InputError):
    """A checkpoint is not what was written."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return DamagedError, (self.path, self.what)  # ranks tell each other


@dataclass(frozen=True)
class File:
    """What a file held when it was written."""

    bytes: int
    xxh128: str  # as xxh128sum prints it. Against decay, not malice: who changes files can change their hashes


@dataclass(frozen=True)
class Source:
    """A source of the training data, as the run that saved found it."""

    path: str
    weight: float
    tokens: int
    fingerprint: str  # of the content, wherever it lies


@dataclass(frozen=True)
class Manifest:
    step: int
    tokens: int  # trained on so far
    saved: str  # when, in ISO 8601
    ranks: int
    layout: dict[str, int]
    versions: dict[str, str]
    config: dict[str, Any]  # under the names that YAML uses
    data: tuple[Source, ...]
    files: dict[str, File]

    def render(self) -> str:
        """The text of manifest.json. Its digest covers all other fields."""
        fields = {"format": FORMAT, **asdict(self)}
        return _render({**fields, "digest": _digest(fields)})

    @staticmethod
    def read(path: Path) -> "Manifest":
        """The manifest of the checkpoint `path`. Raises DamagedError where it is not as it was written."""
        try:
            text = (path / MANIFEST).read_bytes()
            fields = json.loads(text)
        except FileNotFoundError:
            raise DamagedError(path, f"{MANIFEST} is missing") from None
        except ValueError:  # neither JSON nor UTF-8
            raise DamagedError(path, f"{MANIFEST} is damaged") from None
        try:
            digest = fields.pop("digest")
            # To the byte: a changed blank between two fields is not overlooked either.
            if digest != _digest(fields) or text != _render({**fields, "digest": digest}).encode():
                raise DamagedError(path, f"{MANIFEST} is damaged")
        except (AttributeError, KeyError, TypeError):
            raise DamagedError(path, f"{MANIFEST} is damaged") from None
        if (version := fields.pop("format")) != FORMAT:
            raise InputError(f"{path / MANIFEST}: has format {version}; this megalite reads format {FORMAT}")
        data = tuple(Source(**source) for source in fields.pop("data"))
        files = {name: File(**file) for name, file in fields.pop("files").items()}
        return Manifest(**fields, data=data, files=files)

    @property
    def configuration(self) -> Config:
        """The configuration of the run that saved. Keys that this megalite does not know are left out."""
        return from_plain(self.config)[0]


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint tells."""
    return int(path.name.removeprefix("step-"))


def check_sizes(path: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are there, in full. Raises DamagedError."""
    manifest = Manifest.read(path)
    for name, file in manifest.files.items():
        check_size(path, name, file)
    return manifest


def check_size(path: Path, name: str, file: File) -> None:
    """Raises DamagedError unless the checkpoint `path` has the file `name` in full."""
    try:
        size = (path / name).stat().st_size
    except FileNotFoundError:
        raise DamagedError(path, f"{name} is missing") from None
    if size != file.bytes:
        raise DamagedError(path, f"{name} has {size} bytes instead of {file.bytes}")


def check_hashes(path: Path, files: dict[str, File], advanced: Callable[[int], None] = lambda _: None) -> None:
    """Read `files` and compare them with their hashes; `advanced` hears of bytes read. Raises DamagedError."""
    for name, file in files.items():
        digest, block = xxhash.xxh3_128(), memoryview(bytearray(min(BLOCK, file.bytes + 1)))
        with (path / name).open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                digest.update(block[:count])
                advanced(count)
        if digest.hexdigest() != file.xxh128:
            raise DamagedError(path, f"{name} does not have the hash it was written with")


def share_of(files: dict[str, File], rank: int, ranks: int) -> dict[str, File]:
    """The files that one of `ranks` readers takes, about as many bytes as any other."""
    loads, shares = [0] * ranks, [dict[str, File]() for _ in range(ranks)]
    for name, file in sorted(files.items(), key=lambda item: -item[1].bytes):
        least = loads.index(min(loads))
        loads[least] += file.bytes
        shares[least][name] = file
    return shares[rank]


def write_durably(path: Path, text: str) -> None:
    """Write a file that is on the disk afterwards; its name is, once its folder is synchronized."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def synchronize(folder: Path) -> None:
    """Put the names in `folder` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def total_bytes(files: Iterable[File]) -> int:
    return sum(file.bytes for file in files)


def _render(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2) + "\n"


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
