"""Small files of text: written whole or not at all, read with a bound on their size."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The JSON object that a file of at most `most` bytes holds. Raises InputError for anything else."""
    if not path.is_file():
        raise InputError(f"{path}: is not there, or no regular file")
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise InputError(f"{path}: is larger than {most:,} bytes, more than such a file ever has")
        found = json.loads(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or numbers and nesting without end
        raise InputError(f"{path}: is no JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds {type(found).__name__} where a JSON object is expected")
    return found
