"""Files of a Hugging Face folder that are taken along in other formats, in a folder of their own. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from megalite.base.files import is_file, is_folder
from megalite.checkpoint.weights.formats.huggingface import COMPANIONS
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.tokenizer import companions_of
from megalite.checkpoint.weights.maps.families import CONFIG, read_config
from megalite.checkpoint.weights.maps.family import Family
from megalite.config.model_schema import Model

FOLDER = "huggingface"


def config_beside(path: Path) -> tuple[Family, Model] | None:
    """The family and the model that the files taken along in `path` tell, if there are some. Raises InputError.

    These are of formats that have no layers of multi-token prediction.
    """
    if not is_file(path / FOLDER / CONFIG):
        return None
    family, model = read_config(path / FOLDER)
    return family, replace(model, mtp=None)


def beside(path: Path) -> tuple[str | None, tuple[Path, ...]]:
    """The family of the model in the folder `path`, and the files that were taken along, if any. Raises InputError."""
    if not is_folder(path / FOLDER):
        return None, ()
    config = config_beside(path)
    files = (file for file in (path / FOLDER).iterdir() if file.is_file() and COMPANIONS.fullmatch(file.name))
    return config and config[0].model_type, tuple(sorted(files))


def taken_along(found: Weights) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Files to write and files to copy beside weights of another format, by their names in the target."""
    texts, copies = companions_of(found)
    written = {f"{FOLDER}/{name}": text for name, text in texts.items()}
    return written, {f"{FOLDER}/{name}": path for name, path in copies.items()}
