"""Files that megalite comes with, found by their names: the models, runs, experiments and clusters of configs/."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

from megalite.base.errors import InputError, listing
from megalite.base.files import exists, is_folder

PACKAGE = "megalite_presets"  # configs/, as it is installed
CONFIGS = ("model", "run")  # kinds that `megalite train` takes
KINDS = (*CONFIGS, "experiment", "cluster")  # folders of the package
ENDINGS = (".yaml", ".yml")
SHOWN_NAMES = 3  # in a message


@cache
def presets(*kinds: str) -> Mapping[str, Path]:
    """The files of these kinds, by name."""
    package = Path(str(files(PACKAGE)))
    return {path.stem: path for kind in kinds for path in sorted((package / kind).glob("*.yaml"))}


def preset_or_file(given: str, kinds: tuple[str, ...], folder: Path = Path(), asked_by: str = "") -> Path:
    """The file at the path `given`, seen from `folder`; if there is none, the preset of that name.

    A path that is no plain name is returned whether or not it is there. Raises InputError for a name that is unknown.

    asked_by: begins the message, as in `--cluster `.
    """
    path, known = folder / given, presets(*kinds)
    if given in known and (not exists(path) or is_folder(path)):
        return known[given]
    if given.endswith(ENDINGS) or os.sep in given or exists(path):
        return path
    rule = f"is no file, and no {listing(kinds)} that megalite comes with"
    raise InputError(f"{asked_by}{given:.200}: {rule}; {advice(given, known)}")


def advice(given: str, known: Iterable[str]) -> str:
    """Advice on the name that was meant by `given`, which is not among the `known`."""
    near = get_close_matches(given, list(known), SHOWN_NAMES, 0.5)
    meant = f"did you mean {listing(near)}? " if near else ""
    return f"{meant}`megalite list` shows all"
