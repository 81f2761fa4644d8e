"""Files that only one process at a time writes."""

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from megalite.base.errors import InputError
from megalite_launch.base.files import opened

LOCKLESS_ERRORS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system without locks


def claim(path: Path, what: str) -> BinaryIO:
    """An empty file at `path`, open for writing, that belongs to this process until it closes it.

    If a process that has ended left a file there, this one takes it over. Raises InputError while another process has
    it; `what` names what is being written. Raises OSError.
    """
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT)
        file = os.fdopen(descriptor, "r+b", 1 << 20)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InputError(
                f"{what}: is being written by another process; wait for it, or choose another name"
            ) from None
        except OSError as error:
            if error.errno not in LOCKLESS_ERRORS:
                file.close()
                raise
        if _still_there(descriptor, path):
            file.truncate(0)
            return file
        file.close()  # its last owner has renamed or removed it in between


def _still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
