"""Files of token stores on servers: read in blocks by several requests at once, and kept in a local cache.

A file is the object that was there when it was opened: one that changes is refused. A read is tried again, after pauses
that grow, until `data.remote.timeout` has passed.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash

from megalite.base.errors import InputError
from megalite.base.output import warn
from megalite.config.schema import Remote
from megalite.data.block_cache import BLOCK_BYTES, open_cache
from megalite.data.data_file import Bytes, LocalFile, Range
from megalite.data.hashes import blocks_in
from megalite_launch.base.files import SHARED_MODE, new_file

CONCURRENCY = 64  # requests at a time
REQUEST_BLOCKS = 256  # blocks in one request at the most
REQUEST_SECONDS = 30.0  # a request without an answer counts as failed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between tries
HASH_TRIES = 3  # answers with a wrong hash before the object counts as damaged
VERSION_FIELDS = ("ETag", "etag", "generation", "LastModified", "Last-Modified")  # in fsspec's facts about an object
ABSENT, REFUSED = (404, 410), (401, 403)  # statuses of HTTP


@dataclass(frozen=True)
class _Facts:
    size: int  # bytes
    version: str


class RemoteFile:
    """An object at `url`. Raises InputError if it cannot be read, FileNotFoundError if there is none.

    hashes: xxh3-128 of its blocks, `[blocks, 16]`; None: without them, what a server sends is known by size and version
    alone.
    """

    def __init__(self, url: str, remote: Remote) -> None:
        self.name, self._remote = url, remote
        self.hashes: Bytes | None = None
        # A listing that is remembered would hide a change, and an instance that is shared is of another's event loop.
        self._system, self._path = fsspec.url_to_fs(url, use_listings_cache=False)
        self._cache = open_cache(cache_folder(remote), int(remote.cache_size * 2**30))
        facts = self._facts()
        self.size, self.version = facts.size, facts.version
        self._key = xxhash.xxh3_128_intdigest(f"{url}\n{self.version}\n{self.size}".encode())

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """The bytes in each range, from the cache, or by requests all at once. Raises InputError."""
        found = [np.empty(stop - start, np.uint8) for start, stop in ranges]
        missing = dict[int, list[tuple[memoryview, int]]]()  # by block: where parts of it go, and where they begin
        kept = memoryview(bytearray(BLOCK_BYTES))  # one block, so that it stays in the processor's own cache
        for (start, stop), whole in zip(ranges, found, strict=True):
            at, view = start, whole.data
            while at < stop:
                number, begin = divmod(at, BLOCK_BYTES)
                first = at - begin
                block = kept if first + BLOCK_BYTES <= self.size else kept[: self.size - first]
                into = view[at - start : first + BLOCK_BYTES - start]
                if self._cache.read(self._block_key(number), block):
                    into[:] = block[begin : begin + len(into)]
                else:
                    missing.setdefault(number, []).append((into, begin))
                at += len(into)
        if missing:
            for number, block in self._fetched(sorted(missing)).items():
                self._cache.write(self._block_key(number), block)
                for into, begin in missing[number]:
                    into[:] = block[begin : begin + len(into)]
        return found

    def copied(self) -> LocalFile:
        """A copy on the local disk, made unless there is one. Raises InputError."""
        folder = cache_folder(self._remote) / "copies" / f"{self._key:032x}"
        path = folder / self.name.replace("://", "/").lstrip("/")
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._copy(path)
            return LocalFile(path, self.name)
        except OSError as error:
            raise InputError(
                f"{self.name}: cannot be copied to {path}: {error.strerror}; make room, "
                "or name another folder in data.remote.cache"
            ) from error

    def _copy(self, path: Path) -> None:
        count, step = blocks_in(self.size), 16 * REQUEST_BLOCKS
        with new_file(path, SHARED_MODE) as file:
            for first in range(0, count, step):
                numbers = range(first, min(first + step, count))
                blocks = self._fetched(numbers)
                file.writelines(blocks[number] for number in numbers)

    def _block_key(self, number: int) -> int:
        return (self._key + number) % 2**128

    def _fetched(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Blocks as the server has them, checked."""
        blocks = dict[int, memoryview]()
        tries = _Tries(self.name, self._remote.timeout)
        wrong = 0
        while missing := [number for number in numbers if number not in blocks]:
            runs = _runs(missing)
            ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self.size)) for run in runs]
            requests = [self._system._cat_file(self._path, start=start, end=stop) for start, stop in ranges]
            for run, asked, answer in zip(runs, ranges, self._answers(requests), strict=True):
                if not isinstance(answer, bytes):
                    tries.failed(answer)
                elif len(answer) != asked[1] - asked[0]:
                    tries.failed(OSError(f"{len(answer):,} bytes instead of bytes {asked[0]:,} to {asked[1]:,}"))
                else:
                    parts = (memoryview(answer)[at : at + BLOCK_BYTES] for at in range(0, len(answer), BLOCK_BYTES))
                    blocks |= zip(run, parts, strict=True)
            damaged = [number for number in missing if number in blocks and not self._fits(number, blocks[number])]
            if self.hashes is None or damaged or tries.pending:
                self._check_unchanged()
            for number in damaged:
                del blocks[number]
            wrong += bool(damaged)
            if wrong == HASH_TRIES:
                raise InputError(
                    f"{self.name}: block {damaged[0]} of {BLOCK_BYTES:,} bytes is not as its hash in .hashes says; "
                    "upload all files of the store again"
                )
            if damaged:
                tries.failed(OSError(f"block {damaged[0]} does not fit its hash"))
            tries.pause()
        return blocks

    def _fits(self, number: int, block: memoryview) -> bool:
        return self.hashes is None or xxhash.xxh3_128_digest(block) == self.hashes[number].tobytes()

    def _answers(self, requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The result or the error that each request ends with."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def limited(request: Coroutine[Any, Any, Any]) -> Any:
            async with gate:
                return await asyncio.wait_for(request, REQUEST_SECONDS)

        async def together() -> list[Any]:
            return await asyncio.gather(*map(limited, requests), return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(together(), self._system.loop).result()

    def _facts(self) -> _Facts:
        tries = _Tries(self.name, self._remote.timeout)
        while True:
            (found,) = self._answers([self._system._info(self._path)])
            if isinstance(found, dict) and found.get("type") != "directory":
                break
            if isinstance(found, dict) or (isinstance(found, FileNotFoundError) and _status(found) in ABSENT):
                raise FileNotFoundError(self.name)
            tries.failed(found)
            tries.pause()
        version = " ".join(str(found[field]) for field in VERSION_FIELDS if found.get(field))
        if not version or found.get("size") is None:
            raise InputError(
                f"{self.name}: its server tells no size, or neither ETag nor time of change, so that a change "
                "could not be told; copy the store to a disk, or use another server"
            )
        return _Facts(int(found["size"]), version)

    def _check_unchanged(self) -> None:
        try:
            changed = self._facts() != _Facts(self.size, self.version)
        except FileNotFoundError:
            changed = True
        if changed:
            raise InputError(
                f"{self.name}: has changed or gone since it was opened; a run needs the same data all along: "
                "put the old object back, or begin a new run"
            )


class _Tries:
    """The tries of one read: their errors, the time since the first, and the pause before the next."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._began, self._pause = time.monotonic(), FIRST_PAUSE
        self.pending: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        """Remember the error. Raises InputError if no further try can help."""
        if _status(error) in ABSENT + REFUSED or isinstance(error, NotImplementedError):
            fix = "is it there, and do this machine's credentials let it read the object?"
            raise InputError(f"{self._url}: cannot be read: {_reason(error)}; {fix}")
        self.pending = error

    def pause(self) -> None:
        """Wait before the next try, if one is needed. Raises InputError if the time is over."""
        if self.pending is None:
            return
        took, reason = time.monotonic() - self._began, _reason(self.pending)
        if took + self._pause > self._timeout:
            raise InputError(
                f"{self._url}: could not be read for {took:.0f} s: {reason}; "
                "the same command goes on when its server answers, or raise data.remote.timeout"
            )
        warn(f"{self._url}: {reason}; next try in {self._pause:g} s, until {self._timeout:g} s have passed")
        time.sleep(self._pause)
        self.pending, self._pause = None, min(2 * self._pause, LONGEST_PAUSE)


def find(url: str, remote: Remote) -> RemoteFile | None:
    """The object at `url`; None if there is none. Raises InputError if that cannot be told."""
    try:
        return RemoteFile(url, remote)
    except FileNotFoundError:
        return None


def cache_folder(remote: Remote) -> Path:
    """The folder of blocks and copies."""
    return Path(remote.cache).expanduser()


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers in runs of successive ones, each for one request."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < REQUEST_BLOCKS:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _status(error: BaseException) -> int | None:
    """The status of HTTP that an error stands for; None: it is not known.

    Over HTTP, fsspec's `info` raises FileNotFoundError for all that fails, with the reason as its cause.
    """
    for each in (error, error.__cause__):
        told = getattr(each, "response", None)  # botocore has it
        status = told["ResponseMetadata"].get("HTTPStatusCode") if isinstance(told, dict) else None
        if isinstance(status := status or getattr(each, "status", None), int):
            return status
    if isinstance(error, PermissionError):
        return 403
    return 404 if isinstance(error, FileNotFoundError) and error.__cause__ is None else None


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer for {REQUEST_SECONDS:g} s"
    return f"{type(error).__name__}: {str(error)[:300]}" if str(error) else type(error).__name__
