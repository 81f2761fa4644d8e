"""The tokenizer of a run, as the files that transformers expects beside weights. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.formats.opened import Weights
from megalite.config.errors import InputError
from megalite.config.files import as_json, is_file, is_folder, read_object
from megalite.data.tokenizer import BESIDE, MOST_BESIDE, SentencePieceTokenizer, load_tokenizer

GENERATION = "generation_config.json"


def kept_tokenizer(run: Path) -> Path | None:
    """The copy of the tokenizer, in the run folder `run`, that the last start was given."""
    later = sorted((run / "starts").glob("*.tokenizer"), key=lambda path: (len(path.name), path.name))
    return next(filter(None, map(_tokenizer_in, [*reversed(later), run / "tokenizer"])), None)


def _tokenizer_in(folder: Path) -> Path | None:
    if not is_folder(folder, follow=False):
        return None
    found = [path for path in folder.glob("*") if path.suffix in (".model", ".json") and not path.is_symlink()]
    return next((path for path in found if path.name != "tokenizer_config.json"), None)


def tokenizer_files(path: Path, end: int | None) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Files to write and files to copy for the tokenizer `path`; `end`: the id that ends documents, if it is known.

    Raises InputError if the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(path)
    end = tokenizer.eod if end is None else end
    texts = {} if end is None else {GENERATION: _json({"eos_token_id": end, "pad_token_id": end})}
    if isinstance(tokenizer, SentencePieceTokenizer):
        settings = tokenizer.settings()
        unigram = tokenizer.as_unigram()
        if unigram is None:
            return texts | {"tokenizer_config.json": _json(settings)}, {"tokenizer.model": path}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        return texts | {"tokenizer.json": unigram.encode(), "tokenizer_config.json": _json(settings)}, {}
    beside = {name: path.with_name(name) for name in BESIDE if is_file(path.with_name(name))}
    if "tokenizer_config.json" not in beside:
        named = {} if end is None else {"eos_token": tokenizer.piece(end)}
        texts["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    return texts, {"tokenizer.json": path, **beside}


def companions_of(found: Weights) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Files to write and files to copy beside weights: those that came with them, or else a run's tokenizer."""
    if found.tokenizer is not None and not found.companions:
        return tokenizer_files(found.tokenizer, found.end)
    return {}, {file.name: file for file in found.companions}


def ends_in(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as a Hugging Face folder tells; the first is that of documents. Raises InputError."""
    found = read_object(folder / GENERATION, MOST_BESIDE).get("eos_token_id") if is_file(folder / GENERATION) else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{folder / GENERATION}: eos_token_id = {found!r:.100}: must be an id or a list of ids")
    return tuple(ids)


def _json(fields: Mapping[str, Any]) -> bytes:
    return as_json(fields).encode()
