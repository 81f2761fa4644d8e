"""The id of a tracked run in a file of the run folder, by which a run that goes on finds it."""

import re
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object, write_object

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def kept_id(path: Path, project: str | None) -> str | None:
    """The id in the file `path`; None if it has none of this project. Raises InputError for a damaged file."""
    if not exists(path):
        return None
    found = read_object(path, 4096)
    known = found.get("id")
    if not isinstance(known, str) or not ID.fullmatch(known):
        raise InputError(f"{path}: has no id of a tracked run; remove the file to begin a new one there")
    return known if found.get("project") == project else None


def keep_id(path: Path, project: str | None, known: str) -> None:
    """Write the id of a run of this project to the file `path`. Raises InputError."""
    write_object(path, {"project": project, "id": known})
