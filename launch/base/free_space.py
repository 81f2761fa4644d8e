"""Check for room wherever a run writes. On a full disk no rank can say why it ends, and exit codes mislead."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

MIN_FREE_BYTES = 2**20  # bytes that are free where there is room for anything
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def no_room(run: Path) -> str:
    """Return the folder of a run in which nothing more can be written, and why: a full disk or quota. Empty if none.

    Any folder in that of the run, such as `checkpoints` or `logs`, may be a link or a mount.
    """
    folders = [run]
    with suppress(OSError):
        folders += sorted(path for path in run.iterdir() if path.is_dir())
    return next((f"{folder}: {why}" for folder in folders if (why := _refusal(folder))), "")


def _refusal(folder: Path) -> str:
    """Return why a folder has no room for another file; empty if it has room."""
    probe = folder / f".room.{os.getpid()}"
    try:
        found = os.statvfs(folder)
        if found.f_blocks and found.f_bavail * found.f_frsize < MIN_FREE_BYTES:  # some count no blocks at all
            return os.strerror(errno.ENOSPC)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)  # some file systems tell only now
        finally:
            os.close(descriptor)
            probe.unlink()
    except OSError as error:
        return os.strerror(error.errno) if error.errno in FULL_DISK_ERRORS else ""
    return ""
