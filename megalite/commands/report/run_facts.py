"""Facts of a run that lie beside its metrics: configurations, records of starts, and checkpoints.

A run folder may be half written, damaged or made by somebody else: what cannot be read becomes a note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, is_file, read_object
from megalite.checkpoint.store.disk import total_bytes
from megalite.checkpoint.store.manifest import Manifest, check_sizes, complete
from megalite.config.load import typed
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.config.yaml import read_mapping, read_text
from megalite_launch.base.line_files import whole

MAX_START_BYTES = 4 << 20  # bytes of a record of a start, which lists all installed packages
MAX_STARTS, MAX_CHECKPOINTS = 50, 20  # latest ones that are read


@dataclass(frozen=True)
class Start:
    """A record of a start by its name, as in `001`. fields: those of the file, of any kind."""

    name: str
    fields: Mapping[str, Any]

    def text(self, key: str) -> str:
        """A field as text; "" for one that is missing, null or no text or number."""
        value = self.fields.get(key)
        return str(value) if isinstance(value, (str, int, float)) else ""

    @property
    def commit(self) -> str:
        """The first digits of the commit, with `-dirty` where the code had changes; "" outside a checkout."""
        digits, *dirty = self.text("commit").split("-", 1)
        return "-".join([digits[:12], *dirty])

    def mapping(self, key: str) -> dict[str, Any]:
        """A field that is an object; empty for any other."""
        value = self.fields.get(key)
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the name of a checkpoint. manifest: None where it is damaged, with the reason as `damage`."""

    name: str
    manifest: Manifest | None
    damage: str = ""

    @property
    def bytes(self) -> int:
        return 0 if self.manifest is None else total_bytes(self.manifest.files.values())


@dataclass
class RunFacts:
    """All that could be read. text: of the latest configuration. notes: sentences about what could not."""

    starts: list[Start] = field(default_factory=list)
    starts_left_out: int = 0
    config: Config | None = None
    text: str = ""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    checkpoints_left_out: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def latest(self) -> Start | None:
        return self.starts[-1] if self.starts else None

    @property
    def devices(self) -> list[str]:
        """Names of the devices of the latest start."""
        hosts = {} if self.latest is None else self.latest.mapping("devices")
        return sorted({str(name) for each in hosts.values() if isinstance(each, dict) for name in each})


def read_run(folder: Path) -> RunFacts:
    """Read the facts of the run in `folder`."""
    facts = RunFacts()
    _read_starts(folder / "starts", facts)
    _read_config(folder, facts)
    _read_checkpoints(folder / "checkpoints", facts)
    return facts


def _read_starts(folder: Path, facts: RunFacts) -> None:
    try:
        paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{1,9}\.json", path.name))
    except OSError as error:
        facts.notes.append(f"starts/: {error.strerror}, so devices and versions are not known")
        return
    facts.starts_left_out = max(len(paths) - MAX_STARTS, 0)
    for path in paths[-MAX_STARTS:]:
        try:
            facts.starts.append(Start(path.stem, read_object(path, MAX_START_BYTES)))
        except InputError as error:
            facts.notes.append(str(error))


def _read_config(folder: Path, facts: RunFacts) -> None:
    """Read the configuration of the latest start, or else that of the first one. No file is included by it."""
    names = [f"starts/{facts.latest.name}.yaml"] if facts.latest is not None else []
    for path in (folder / name for name in (*names, "config.yaml")):
        try:
            if not exists(path):
                continue
            if not is_file(path):
                raise InputError(f"{path}: is no regular file")
            content, text = read_mapping(path), read_text(path)
            ranks = None if facts.latest is None else whole(facts.latest.fields.get("ranks"))
            config, problems = typed(content)
            facts.text = text
            if problems:
                raise InputError(problems)
            facts.config = check(config, ranks or None)
        except (InputError, OSError, ValueError) as error:
            facts.notes.append(f"{path}: {error}")
        else:
            return
    facts.notes.append("No configuration could be read, so model and layout are not known.")


def _read_checkpoints(folder: Path, facts: RunFacts) -> None:
    try:
        paths = complete(folder)
    except InputError as error:
        facts.notes.append(str(error))
        return
    facts.checkpoints_left_out = max(len(paths) - MAX_CHECKPOINTS, 0)
    for path in paths[-MAX_CHECKPOINTS:]:
        try:
            facts.checkpoints.append(Checkpoint(path.name, check_sizes(path)))
        except InputError as error:
            facts.checkpoints.append(Checkpoint(path.name, None, str(error)))
