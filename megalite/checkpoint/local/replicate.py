"""Copies files between nodes over a process group, so that each node has those of the node before it, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.local.nodes import Nodes
from megalite.checkpoint.store.disk import DamagedError, File, opened, read_at
from megalite.checkpoint.store.files import HashedFile
from megalite.checkpoint.store.host_group import HostGroup

PIECE = 1 << 24  # bytes on their way at a time


class FilePart(NamedTuple):
    """A part of a file."""

    name: str
    first: int
    size: int


class FileExchange:
    """Sends this rank's files in `folder` to the next node, and receives those of a rank of the node before.

    files: of the whole checkpoint, as they were written. written: the names of the files of every rank. advanced:
    called as bytes arrive.
    """

    def __init__(
        self,
        group: HostGroup,
        nodes: Nodes,
        folder: Path,
        files: Mapping[str, File],
        written: Sequence[Sequence[str]],
        beside: ThreadPoolExecutor,
        advanced: Callable[[], None],
    ) -> None:
        self.group, self.nodes, self.folder, self.files, self.written = group, nodes, folder, files, written
        self._beside, self._advanced = beside, advanced
        self._problem: Exception | None = None  # error of this disk, kept so that the other node is not left waiting

    def run(self) -> None:
        """Exchange all files; collective. Raises OSError if what was to arrive here is not whole."""
        for targets in self.nodes.rounds():
            sources = {target: sender for sender, target in targets.items()}
            self._round(targets.get(self.group.rank), sources.get(self.group.rank))
        if self._problem is not None:
            raise OSError(f"{self.folder}: the copy of another node's part: {self._problem}")

    def _round(self, target: int | None, source: int | None) -> None:
        going = self._parts(target is not None, self.group.rank)
        coming = self._parts(source is not None, source or 0)
        buffers = [[torch.empty(PIECE, dtype=torch.uint8) for _ in range(2)] for _ in range(2)]
        files = ExitStack()
        arriving: dict[str, HashedFile] = {}
        before: tuple[FilePart, Tensor] | None = (
            None  # piece that has arrived, and is written while the next is under way
        )
        for turn, (sent, received) in enumerate(zip_longest(going, coming)):
            out, into = buffers[turn % 2]
            works: list[Any] = []
            if received is not None:
                works.append(dist.irecv(into[: received.size], source, group=self.group.group))
            if sent is not None:
                self._try(partial(self._read, sent, out))
                works.append(dist.isend(out[: sent.size], target, group=self.group.group))
            if before is not None:
                self._try(partial(self._keep, *before, arriving, files))
            for work in works:
                work.wait()
            before = (received, into) if received is not None else None
            self._advanced()
        if before is not None:
            self._try(partial(self._keep, *before, arriving, files))
        try:
            files.close()
        except OSError as error:  # bytes that were still to be written cannot be
            self._problem = self._problem or error

    def _parts(self, any_: bool, rank: int) -> Iterator[FilePart]:
        for name in self.written[rank] if any_ else ():
            size = self.files[name].bytes
            for first in range(0, size, PIECE):
                yield FilePart(name, first, min(PIECE, size - first))

    def _try(self, work: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                work()
            except (OSError, DamagedError) as error:
                self._problem = error

    def _read(self, part: FilePart, target: Tensor) -> None:
        with opened(self.folder, part.name) as descriptor:
            read_at(self.folder, part.name, descriptor, target[: part.size].numpy().data, part.first)

    def _keep(self, part: FilePart, piece: Tensor, arriving: dict[str, HashedFile], files: ExitStack) -> None:
        """Write a part that has arrived; after the last of a file, compare the file with what was sent."""
        if part.first == 0:
            stream = files.enter_context((self.folder / part.name).open("xb"))
            arriving[part.name] = HashedFile(stream, self._beside, self._advanced)
        file, expected = arriving[part.name], self.files[part.name]
        file.write(piece[: part.size].numpy().data)
        if part.first + part.size == expected.bytes and file.finish() != expected:
            raise OSError(f"{part.name} has not arrived as it was written")
