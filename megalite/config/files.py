"""Files that are there whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from megalite.config.errors import InputError


def write_whole(path: Path, text: str) -> None:
    """Write a whole file or none, and the folder that it lies in. Raises InputError where that cannot be."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
