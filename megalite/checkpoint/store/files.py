"""Writing the files of a checkpoint, in the format of PyTorch Distributed Checkpoint (DCP): hashed while they are
written, and on the disk when they are closed.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import WriteResult

from megalite.checkpoint.store.archive import Archive
from megalite.checkpoint.store.disk import BLOCK, DamagedError, File, opened
from megalite.checkpoint.store.index import Chunk, Index
from megalite.checkpoint.store.manifest import INDEX

BUFFER_BYTES = 1 << 18  # bytes gathered before they are written
FLUSH_BYTES = 1 << 26  # bytes after which what is written starts on its way to the disk


METADATA = ".metadata"  # DCP's own index


class HashedFile(io.RawIOBase):
    """A file that is written from its beginning to its end, and hashed on the way.

    Meanwhile a thread of `beside` flushes it, to keep the disk busy.
    """

    def __init__(self, file: BinaryIO, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        super().__init__()
        self._file, self._beside, self._advanced = file, beside, advanced
        self._digest, self._bytes, self._flushed = xxhash.xxh3_128(), 0, 0
        self._flushing: Future[None] | None = None
        self.refused: OSError | None = None  # why the system has not taken all; PyTorch has words of its own for that

    def write(self, piece: Any) -> int:
        view = memoryview(piece).cast("B")
        self._digest.update(view)
        try:
            self._file.write(view)
            self._bytes += len(view)
            if self._bytes - self._flushed >= FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
                self._wait()
                self._flushed = self._bytes
                self._flushing = self._beside.submit(os.fdatasync, self._file.fileno())
        except OSError as error:
            self.refused = error
            raise
        self._advanced()
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def finish(self) -> File:
        """Flush the file to the disk. Returns its size and hash."""
        self._file.flush()
        self._wait()
        os.fsync(self._file.fileno())
        return File(self._bytes, self._digest.hexdigest())

    def _wait(self) -> None:
        """Wait for the pending flush, and raise its error: the system reports that only once."""
        if self._flushing is not None:
            self._flushing.result()


class HashingFileSystem(FileSystem):
    """Notes the size and hash of every file that is written; `advanced` is called as bytes reach the system."""

    def __init__(self, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        self.written: dict[str, File] = {}
        self._beside, self._advanced = beside, advanced

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        hashed: HashedFile | None = None
        try:
            with Path(path).open(mode, buffering=BUFFER_BYTES) as file:
                hashed = HashedFile(cast(BinaryIO, file), self._beside, self._advanced)
                yield hashed
                self.written[Path(path).name] = hashed.finish()
        except Exception as error:
            refused = error if isinstance(error, OSError) else None if hashed is None else hashed.refused
            if refused is None or refused.errno is None:
                raise
            raise OSError(refused.errno, refused.strerror, str(path)) from error
        self._advanced()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes one rank's file of a checkpoint, and on the first rank both indexes. A thread of `beside` flushes."""

    def __init__(self, path: Path, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        # The file system below syncs. Copying ahead would wait for the current device, not for that of the tensors.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self._hashing = HashingFileSystem(beside, advanced)
        self.fs = self._hashing

    @property
    def written(self) -> dict[str, File]:
        """Files that this rank has written so far, by name."""
        return self._hashing.written

    def write(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[WriteResult], Index]:
        """Write what is planned for this rank. Returns where its elements lie, too."""
        results = self.write_data(plan, planner).value()
        planned = {item.index: cast(TensorWriteData, item.tensor_data) for item in plan.items}
        return results, Index.of(self._chunk(planned[result.index], result) for result in results)

    def _chunk(self, tensor: TensorWriteData, written: WriteResult) -> Chunk:
        stored = written.storage_data
        with opened(Path(self.path), stored.relative_path) as descriptor:
            position, size = Archive(descriptor, stored.offset, stored.length).locate("data/0")
        dtype, sizes = tensor.properties.dtype, tensor.chunk.sizes
        if size != sizes.numel() * dtype.itemsize:
            raise OSError(f"{stored.relative_path} has {size} bytes of {written.index.fqn} {list(sizes)}")
        named = str(dtype).removeprefix("torch.")
        return Chunk(written.index.fqn, named, tensor.size, stored.relative_path, position, tensor.chunk.offsets, sizes)

    def write_index(self, index: Index) -> None:
        with self.fs.create_stream(Path(self.path) / INDEX, "wb") as file:
            file.write(index.encode())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the name that the folder has while it is written


def copy(
    name: str, file: File, source: Path, target: Path, beside: ThreadPoolExecutor, advanced: Callable[[], None]
) -> None:
    """Copy a file from one folder to another, where it is on the disk then.

    Raises DamagedError if it does not have the size and hash of `file` in `source`, and OSError if it cannot be
    written. A thread of `beside` flushes; advanced: called as bytes reach the system.
    """
    with opened(source, name) as descriptor, (target / name).open("xb") as out:
        hashed = HashedFile(cast(BinaryIO, out), beside, advanced)
        block = memoryview(bytearray(BLOCK))
        while count := os.readv(descriptor, [block]):
            hashed.write(block[:count])
        if hashed.finish() != file:
            raise DamagedError(source, f"{name} does not have the hash it was written with")


def write_bytes(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files, which are then on the disk."""
    for name, content in files.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
