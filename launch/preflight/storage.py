"""The file system of checkpoints: room, speed, and whether other nodes see what one has written."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..base.texts import memory_text
from .findings import FAIL, OK, UNCHECKED, WARN, Sheet
from .thresholds import Limits

BLOCK = 2**22  # bytes
SHM = Path("/dev/shm")
GIB = 2**30


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written to be read by another node."""

    path: Path
    size: int  # bytes
    digest: str  # SHA-256
    seconds: float  # seconds that writing took, with fsync

    def note(self) -> dict[str, Any]:
        return {"path": str(self.path), "size": self.size, "digest": self.digest}


def check_room(sheet: Sheet, folder: Path, checkpoint: Optional[int], limits: Limits) -> None:
    """Free space and inodes where checkpoints go. checkpoint: bytes of one; None: not known."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        sheet.add("free space", FAIL, None, "", f"{folder}: {error.strerror}")
        return
    free = found.f_bavail * found.f_frsize
    if checkpoint is None:
        text = f"{memory_text(free)} free; how large a checkpoint is, is not known (--checkpoint-size)"
        sheet.add("free space", UNCHECKED, free, "", text)
    else:
        times = free / max(checkpoint, 1)
        text = f"{memory_text(free)} free, {times:,.1f} checkpoints of {memory_text(checkpoint)}"
        sheet.judge("free space", round(times, 2), "<", limits, "checkpoints", text)
    needed = limits.number("inodes")
    if found.f_files == 0:  # some file systems make inodes as they need them
        sheet.add("free inodes", UNCHECKED, None, "", "this file system does not count them")
    elif needed is not None:
        bad = found.f_favail < needed
        sheet.add("free inodes", FAIL if bad else OK, found.f_favail, f"fail < {needed:g}", f"{found.f_favail:,} free")


def check_shm(sheet: Sheet, limits: Limits, shm: Path = SHM) -> None:
    """Room in the shared memory of processes."""
    needed = limits.number("shm_gib")
    if not needed:
        return
    try:
        found = os.statvfs(shm)
    except OSError as error:
        sheet.add("/dev/shm", FAIL, None, f"fail < {needed:g} GiB", f"{shm}: {error.strerror}")
        return
    gib = found.f_bavail * found.f_frsize / GIB
    sheet.add("/dev/shm", FAIL if gib < needed else OK, round(gib, 2), f"fail < {needed:g} GiB", f"{gib:,.1f} GiB free")


def write(folder: Path, node: str, size: int) -> WrittenFile:
    """Write `size` bytes that no file system can make smaller, up to fsync of the file and of its folder.

    Raises OSError; leaves no file behind then.
    """
    path = folder / f".preflight-{node}-{os.getpid()}-{time.time_ns()}"
    random, digest = os.urandom(BLOCK), hashlib.sha256()
    blocks = [_block(random, place)[: size - place] for place in range(0, size, BLOCK)]
    for block in blocks:
        digest.update(block)
    try:
        start = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for block in blocks:
                view = memoryview(block)
                while view:
                    view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        folder_descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)
        seconds = time.perf_counter() - start
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    return WrittenFile(path, size, digest.hexdigest(), seconds)


def _block(random: bytes, place: int) -> bytes:
    """A block unlike all others of the file."""
    return place.to_bytes(8, "little") + random[8:]


def judge_write(sheet: Sheet, written: WrittenFile, checkpoint: Optional[int], nodes: int, limits: Limits) -> None:
    """Add a finding: whether this node writes fast enough for its part of a checkpoint."""
    rate = written.size / max(written.seconds, 1e-9)
    sheet.measured["write"] = {"bytes": written.size, "seconds": written.seconds, "rate": rate}
    target, shown = limits.number("save_seconds"), f"{rate / 1e6:,.0f} MB/s with fsync, {written.size / 2**20:,.0f} MiB"
    if checkpoint is None or not target or written.size < BLOCK:
        sheet.add("write", OK, round(rate), "can be written", shown)
        return
    needed = checkpoint / nodes / target
    text = f"{shown}; {needed / 1e6:,.0f} MB/s saves a checkpoint in {target:g} s"
    sheet.add("write", FAIL if rate < needed else OK, round(rate), f"fail < {round(needed)} bytes/s", text)


def read_back(sheet: Sheet, node: str, note: Any, wait: float, limits: Limits) -> None:
    """Read the file that `node` has written and fsynced before its note; wait at most `wait` seconds for the file."""
    path, limit = Path(note["path"]), limits.number("visible_seconds")
    rule = "the same bytes" + (f", warn > {limit:g} s" if limit is not None else "")
    start = time.monotonic()
    while True:
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < note["size"] and time.monotonic() - start < wait:
                    raise FileNotFoundError
                seen, begun, digest, size = time.monotonic() - start, time.perf_counter(), hashlib.sha256(), 0
                for block in iter(lambda: file.read(BLOCK), b""):
                    digest.update(block)
                    size += len(block)
            break
        except FileNotFoundError:
            if time.monotonic() - start >= wait:
                text = f"{node} has written {path}, which is not to be seen here after {wait:.0f} s"
                sheet.add("read back", FAIL, None, rule, text)
                return
            time.sleep(0.02)
        except OSError as error:
            sheet.add("read back", FAIL, None, rule, f"{path}, written by {node}, cannot be read: {error.strerror}")
            return
    rate = size / max(time.perf_counter() - begun, 1e-9)
    match = digest.hexdigest() == note["digest"]
    sheet.measured["read_back"] = {"of": node, "visible_seconds": seen, "rate": rate, "match": match}
    if not match:
        sheet.add("read back", FAIL, size, rule, f"{path}: other bytes than {node} has written")
        return
    late = limit is not None and seen > limit
    text = f"{node}'s file seen after {seen:.2f} s, read at {rate / 1e6:,.0f} MB/s"
    sheet.add("read back", WARN if late else OK, round(seen, 3), rule, text)


def checkpoint_bytes(folder: Path) -> Optional[int]:
    """The size of the newest checkpoint in a folder of them; None without one."""
    try:
        found = sorted(path for path in folder.iterdir() if path.name.startswith("step-") and path.is_dir())
        return sum(file.stat().st_size for file in found[-1].rglob("*") if file.is_file()) if found else None
    except OSError:
        return None
