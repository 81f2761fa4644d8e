"""The run folder's layout."""

from dataclasses import dataclass
from pathlib import Path

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config


@dataclass(frozen=True)
class Folder:
    """Where a run leaves its files."""

    path: Path

    @staticmethod
    def of(config: Config) -> "Folder":
        return Folder(Path(config.run.dir) / config.run.name)

    def make(self) -> None:
        """Make what is missing of it. Raises InputError where that is refused."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"{self.logs} cannot be made: {error.strerror}"
            raise InputError(
                [Problem("run.dir", rule, "name a folder that can be written to", str(self.path.parent))]
            ) from error

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"
