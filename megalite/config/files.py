"""Files that are there whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from megalite.config.errors import InputError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a whole file or none, and the folder that it lies in. Raises InputError where that cannot be."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # a link of that name leads nowhere
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
