"""The layout of a run folder, and a check that a run can write there."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from megalite.base.errors import InputError, unwritable
from megalite.config.schema import Config
from megalite.distributed.start.local import log_file
from megalite_launch.base.files import foreign
from megalite_launch.base.run_folder import ATTEMPT

FILES = ("metrics.jsonl", "config.yaml", "wandb.json", "mlflow.json", "events.jsonl", "interval.json")
FOLDERS = (
    "lock",
    "attempts",
    "logs",
    "mlflow",
    "checkpoints",
    "export",
    "profile",
    "starts",
    "tensorboard",
    "tokenizer",
    "wandb",
)


@dataclass(frozen=True)
class Folder:
    """The paths of a run's files."""

    path: Path

    @staticmethod
    def of(config: Config) -> "Folder":
        return Folder(Path(config.run.dir) / config.run.name)

    def check(self, ranks: int) -> None:
        """Raises InputError with every path there that `ranks` ranks could not write to, or that leads elsewhere."""
        nearest = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        folders = dict.fromkeys([*(self.path / name for name in FOLDERS), self.logs, self.flights])
        files = [self.path / name for name in FILES] + [log_file(self.logs, rank) for rank in range(ranks)]
        files += (self.path / "tensorboard").glob("events.*")  # whose writer opens whatever has the name of this second
        own = [*((path, True) for path in folders), *((path, False) for path in files)]
        problems = [_hindrance(nearest, True), *(_hindrance(path, folder) or _foreign(path) for path, folder in own)]
        if found := list(filter(None, problems)):
            remedy = "fix, move or remove what is there, or set run.dir or run.name"
            raise InputError("\n  ".join(["the run folder cannot be written to", *found, remedy]))

    def make(self) -> None:
        """Make those folders that a launcher needs. Raises InputError, and Unhealthy on a full disk."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.logs, "cannot be made", error, "set run.dir") from error

    @property
    def logs(self) -> Path:
        """The folder of logs: that of the current attempt, where a supervisor has named it."""
        attempt = os.environ.get(ATTEMPT)
        return self.path / "logs" / Path(attempt).name if attempt else self.path / "logs"

    @property
    def flights(self) -> Path:
        """The folder in which ranks that hang leave their records of collectives."""
        attempt = os.environ.get(ATTEMPT)
        return (Path(attempt) if attempt else self.path / "logs") / "flight"

    @property
    def data(self) -> Path:
        """The file for the results of scans of the data."""
        return self.path / "data.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def _foreign(path: Path) -> str:
    """The reason why other files would be written through `path`; empty if none would."""
    told = foreign(path)
    return f"{path}: {told}" if told else ""


def _hindrance(path: Path, folder: bool) -> str:
    """The reason why a folder, or else a file, cannot be made or written to at `path`; empty if it can."""
    wanted, needed = ("a folder", os.W_OK | os.X_OK) if folder else ("a file", os.W_OK)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"{path}: must be {wanted}, but is a link that leads nowhere" if path.is_symlink() else ""
    except NotADirectoryError:  # something is told already about the folder around it
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        found = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"
        return f"{path}: must be {wanted}, but is {found}"
    return "" if os.access(path, needed) else f"{path}: cannot be written to"
