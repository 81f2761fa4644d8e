"""The files of a checkpoint, in the format of PyTorch Distributed Checkpoint (DCP): hashed while they are written, on
the disk when they are closed, and read without running what a file may say.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megalite.checkpoint.manifest import File

METADATA = ".metadata"  # DCP's own index
BUFFER = 1 << 18  # bytes gathered before they are written
FLUSHED = 1 << 26  # bytes after which what is written starts on its way to the disk
MAY_BE_UNPICKLED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool"},
    "pathlib": {"Path", "PosixPath"},
    "collections": {"OrderedDict"},
}


class HashedFile(io.RawIOBase):
    """A file being written from its beginning to its end, hashed on the way.

    A thread of `beside` keeps the disk busy meanwhile.
    """

    def __init__(self, file: BinaryIO, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        super().__init__()
        self._file, self._beside, self._advanced = file, beside, advanced
        self._digest, self._bytes, self._flushed = xxhash.xxh3_128(), 0, 0
        self._flushing: Future[None] | None = None

    def write(self, piece: Any) -> int:
        view = memoryview(piece).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self._bytes += len(view)
        if self._bytes - self._flushed >= FLUSHED and (self._flushing is None or self._flushing.done()):
            self._wait()
            self._flushed = self._bytes
            self._flushing = self._beside.submit(os.fdatasync, self._file.fileno())
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
        """Put it on the disk."""
        self._file.flush()
        self._wait()
        os.fsync(self._file.fileno())
        return File(self._bytes, self._digest.hexdigest())

    def _wait(self) -> None:
        """The system tells of an error once, and might tell it here."""
        if self._flushing is not None:
            self._flushing.result()


class HashingFileSystem(FileSystem):
    """Keeps size and hash of every file written; `advanced` is called as bytes reach the system."""

    def __init__(self, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        self.written: dict[str, File] = {}
        self._beside, self._advanced = beside, advanced

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode, buffering=BUFFER) as file:
            hashed = HashedFile(cast(BinaryIO, file), self._beside, self._advanced)
            yield hashed
            self.written[Path(path).name] = hashed.finish()
        self._advanced()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(FileSystemWriter):
    """One rank's file of a checkpoint, and DCP's index on the first rank. Flushing runs in a thread of `beside`."""

    def __init__(self, path: Path, beside: ThreadPoolExecutor, advanced: Callable[[], None]) -> None:
        super().__init__(path, sync_files=False)  # the file system below does it
        self._hashing = HashingFileSystem(beside, advanced)
        self.fs = self._hashing

    @property
    def written(self) -> dict[str, File]:
        """By name, what this rank has written so far."""
        return self._hashing.written

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the name that the folder has while it is written


class Reader(FileSystemReader):
    """Reads checkpoints of any DCP writer that keeps tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        with path.open("rb") as file:
            try:
                metadata = Restricted(file).load()
            except (
                pickle.UnpicklingError,
                EOFError,
                AttributeError,
                IndexError,
                KeyError,
                TypeError,
                ValueError,
            ) as error:
                raise pickle.UnpicklingError(f"{path}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{path}: is no index of a checkpoint")
        return metadata


class Restricted(pickle.Unpickler):
    """Unpickles DCP's index and nothing else: no other class or function is ever called."""

    def find_class(self, module: str, name: str) -> Any:
        if name in MAY_BE_UNPICKLED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs")
