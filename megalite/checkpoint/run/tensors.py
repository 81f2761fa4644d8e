"""The tensors of a checkpoint of any layout: each one whole, one at a time, without a process group."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.run.load import checked_progress
from megalite.checkpoint.store.disk import check_hashes, damage_of
from megalite.checkpoint.store.manifest import INDEX, check_sizes
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.state import empty_progress
from megalite.checkpoint.weights.reader import Reader, allocated


class Checkpoint:
    """The tensors of a checkpoint of any layout. Raises InputError if it cannot be read.

    At once, sizes of files are checked and the hash of the index, which says where tensors lie. The hash of another
    file is checked when a tensor is read from it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, check_sizes(path)
        self._reader = Reader.of_checkpoint(path, self.manifest)
        self.tensors = self._reader.index.tensors
        self._hashed: set[str] = set()

    def read(self, name: str) -> Tensor:
        """A whole tensor. Needs memory for this tensor only."""
        self._check(name)
        stored = self.tensors[name]
        tensor = allocated(self.path, stored.shape, getattr(torch, stored.dtype))
        self._reader.fill({name: tensor})
        return tensor

    def kind(self, name: str) -> dict[str, Any] | None:
        """Shape, dtype and bytes of a tensor, if there is one of that name."""
        if name not in self.tensors:
            return None
        stored = self.tensors[name]
        return {"shape": list(stored.shape), "dtype": stored.dtype, "bytes": stored.bytes}

    def type(self, name: str) -> str:
        """Dtype and shape as text: `float32 [8, 16]`, or `absent`."""
        kind = self.kind(name)
        return f"{kind['dtype']} {kind['shape']}" if kind else "absent"

    def progress(self) -> tuple[Progress, float] | None:
        """The progress and the learning rate; None if there is none. For so little, no hash is checked."""
        if not self.manifest.resumable:
            return None
        with damage_of(self.path, INDEX):
            tensors = empty_progress(self._reader.index)
            rate = torch.empty((), dtype=torch.float64)
            self._reader.fill({**tensors, "schedule.learning_rate": rate})
        return checked_progress(self.path, self.manifest, tensors), rate.item()

    def check_locations(self) -> None:
        """Check that the positions of all tensors are possible."""
        self._reader.check(self.tensors)

    def _check(self, name: str) -> None:
        """Compare the files that hold a tensor with their hashes, each once."""
        needed = {self._reader.index.files[number] for number in self.tensors[name].rows[:, 0]} - self._hashed
        check_hashes(self.path, {file: self.manifest.files[file] for file in sorted(needed)})
        self._hashed |= needed
