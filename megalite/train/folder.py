"""The run folder's layout."""

from dataclasses import dataclass
from pathlib import Path

from megalite.config.schema import Config


@dataclass(frozen=True)
class Folder:
    """Where a run leaves its files."""

    path: Path

    @staticmethod
    def of(config: Config) -> "Folder":
        return Folder(Path(config.run.dir) / config.run.name)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"
