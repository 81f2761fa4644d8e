"""The nodes of a killed run, each a folder here: what is on them, told without megalite's own code, and losing one."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash
from violation import Violation
from whole_checkpoints import MANIFEST, complete


class LocalNodes:
    """The nodes of a run whose folder of checkpoints is `checkpoints`. Each rank is on a node of its own."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self.folder, self.checkpoints = folder, checkpoints

    def places(self) -> list[Path]:
        """The folders of checkpoints on all nodes, of any life."""
        return list(self.folder.glob("node-*/*/life-*"))

    def whole(self, count: int) -> int:
        """The newest step of the present life of which every file is whole on one of the first `count` nodes; or 0."""
        held: dict[tuple[int, str], set[str]] = {}
        for node in range(count):
            for step, path in self._present(node).items():
                text = (path / MANIFEST).read_text() if (path / MANIFEST).exists() else ""
                if text:
                    held.setdefault((step, text), set()).update(_intact(path, text))
        whole = [step for (step, text), names in held.items() if names == json.loads(text)["files"].keys()]
        return max(whole, default=0)

    def lose_one(self, count: int, rng: random.Random) -> bool:
        """Delete one of `count` nodes, if there are several. Raises Violation if what was complete on all is lost."""
        if count < 2:
            return False
        everywhere = set.intersection(*(set(self._present(node)) for node in range(count)))
        lost = rng.randrange(count)
        shutil.rmtree(self.folder / f"node-{lost}", ignore_errors=True)
        if (left := self.whole(count)) < (needed := max(everywhere, default=0)):
            raise Violation(
                f"{self.folder}: step {needed} was complete on {count} nodes; without {lost}, {left} is whole"
            )
        return True

    def check_empty(self) -> None:
        """Raise Violation if a run that has ended has left anything of its latest nodes' checkpoints."""
        if left := [path for place in self.places() if self._is_present(place) for path in place.iterdir()]:
            raise Violation(f"{self.folder}: the run has ended and left {left}")

    def _present(self, node: int) -> dict[int, Path]:
        """By step: what has the name of a checkpoint of the present life."""
        found = (
            complete(place) for place in self.places() if place.parts[-3] == f"node-{node}" and self._is_present(place)
        )
        return next(found, {})

    def _is_present(self, place: Path) -> bool:
        identity = self.checkpoints / "local.json"
        if not identity.exists():
            return False
        told = json.loads(identity.read_text())
        return place.parts[-2:] == (told["run"], f"life-{told['life']:06d}")


def _intact(path: Path, manifest: str) -> Iterator[str]:
    for name, file in json.loads(manifest)["files"].items():
        if (path / name).exists() and xxhash.xxh128((path / name).read_bytes()).hexdigest() == file["xxh128"]:
            yield name
