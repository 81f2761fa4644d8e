"""Paths that people give, and small text files: written whole or not at all, read with a bound on their size."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.json_bounds import parse
from megalite.base.stop_signals import held_up
from megalite_launch.base import files
from megalite_launch.base.files import SHARED_MODE

FIXES = {
    errno.EACCES: "let this user into the folders that lead there",
    errno.ELOOP: "fix the link, which leads back to itself",
    errno.ENAMETOOLONG: "use a shorter name",
}


class UnreachableError(InputError):
    """The system refuses to tell whether there is anything at a path."""

    def __init__(self, path: str | Path, rule: str, fix: str = "") -> None:
        super().__init__(f"{path!s:.400}: {rule}" + (f"; {fix}" if fix else ""))
        self.path, self.rule, self.fix = path, rule, fix

    def __reduce__(self) -> tuple[type, tuple[str | Path, str, str]]:
        return UnreachableError, (self.path, self.rule, self.fix)  # ranks tell each other


def look(path: str | Path, follow: bool = True) -> os.stat_result | None:
    """The status of what is at `path`; None if nothing is. Raises UnreachableError if the system refuses to tell.

    In that case `Path.exists` and its like raise OSError, or say that nothing is there.

    follow: look at the target of a link, not at the link.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        fix = FIXES.get(error.errno or 0, "")
        raise UnreachableError(path, f"cannot be looked at: {error.strerror}", fix) from None
    except ValueError as error:  # a null byte, or a character that no file name can have
        raise UnreachableError(path, f"is no path: {error}", "leave that character out") from None


def exists(path: str | Path, follow: bool = True) -> bool:
    """Return whether there is anything at `path`; raises and follows links as `look` does."""
    return look(path, follow) is not None


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file at `path`, or a link to one; raises as `look` does."""
    found = look(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: str | Path, follow: bool = True) -> bool:
    """Return whether there is a folder at `path`, or a link to one; raises as `look` does."""
    found = look(path, follow)
    return found is not None and stat.S_ISDIR(found.st_mode)


def write_whole(path: Path, content: str | bytes, mode: int = SHARED_MODE) -> None:
    """Write a whole file or none, and the folder that it lies in. Stop signals wait meanwhile.

    Raises InputError if that cannot be done, or if there is something at `path` that is no regular file: a folder, a
    device, or a link, which would be replaced.
    """
    check_output(path)
    _write(path, content, mode, os.replace)


def write_new(path: Path, content: str | bytes) -> None:
    """Write as `write_whole`, unless a file is at `path`, even if it came a moment ago: that is an InputError."""

    def give_name(temporary: Path, path: Path) -> None:
        try:
            files.give_new_name(temporary, path)
        except FileExistsError:
            raise InputError(f"{path}: there is such a file already; give another name") from None

    check_output(path)
    _write(path, content, SHARED_MODE, give_name)


def _write(path: Path, content: str | bytes, mode: int, give_name: Callable[[Path, Path], object]) -> None:
    with held_up():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(path, content, mode, give_name)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def check_output(path: Path) -> None:
    """Raises InputError unless there is nothing at `path`, or a regular file that may be replaced."""
    found = look(path, follow=False)
    if found is None or stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISLNK(found.st_mode):
        raise InputError(f"{path}: is a link, and stays one; name the file that it leads to")
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{path}: is a folder; name a file in it")
    raise InputError(f"{path}: is a device or a pipe; name a file")


def check_copied(path: Path) -> None:
    """Raises InputError for a link out of its folder: a copy would have the content of any file.

    A hub's cache may have its links: `models--NAME/snapshots/REVISION/…/FILE` leads to `models--NAME/blobs/HASH`.
    """
    folder, real = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    snapshots = next((above.parent for above in (folder, *folder.parents) if above.parent.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if not real.is_relative_to(folder) and real.parent != blobs:
        raise InputError(
            f"{path}: leads to {real}, outside of its folder, and is not copied; put that file in its place"
        )


def read_copied(path: Path, most: int) -> bytes:
    """The content of a file beside one that the user has named, of at most `most` bytes. Raises InputError."""
    check_copied(path)
    try:
        content = files.read_bytes(path, most + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, and is not copied; put a file in its place") from error
    if len(content) > most:
        raise InputError(f"{path}: is larger than {most:,} bytes, more than such a file ever has, and is not copied")
    return content


def check_writable(path: Path) -> None:
    """Check as `check_output`, and check that the folder is there and may be written into, or can be made."""
    check_output(path)
    folder = path.absolute().parent
    while not exists(folder):
        folder = folder.parent
    if not is_folder(folder):
        raise InputError(f"{path}: cannot be written: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written: this user may not write into {folder}")


def write_object(path: Path, value: Any) -> None:
    """Write an object as a JSON file, as `write_whole` does."""
    write_whole(path, as_json(value))


def as_json(value: Any) -> str:
    """The text of a JSON file that people read too."""
    return json.dumps(value, indent=2) + "\n"


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes. Raises InputError for anything else."""
    if not is_file(path):
        raise InputError(f"{path}: is missing, or is not a regular file")
    try:
        raw = files.read_bytes(path, most + 1)
        if len(raw) > most:
            raise InputError(f"{path}: is larger than {most:,} bytes, more than such a file ever has")
        found = parse(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except InputError:
        raise
    except ValueError as error:  # neither UTF-8 nor JSON, or numbers, nesting or values without end
        raise InputError(f"{path}: is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds {type(found).__name__} where a JSON object is expected")
    return found
