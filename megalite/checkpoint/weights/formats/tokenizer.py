"""The tokenizer of a run, as the files that transformers expects beside weights. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import as_json, is_file, is_folder, read_object
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.sentence_piece import tokenizer_json
from megalite.data.odd_texts import ODD_TEXTS
from megalite.data.tokenizer import (
    COMPANION_FILES,
    MAX_COMPANION_BYTES,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megalite.data.trial import open_tokenizer_file

GENERATION_CONFIG = "generation_config.json"
# How the tokenizer of Qwen2 divides text into words.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Said beside a tokenizer.json, these make transformers read it as it is, and not as a class of its own would.
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


def kept_tokenizer(run: Path) -> Path | None:
    """The copy of the tokenizer, in the run folder `run`, that the last start was given."""
    later = sorted((run / "starts").glob("*.tokenizer"), key=lambda path: (len(path.name), path.name))
    return next(filter(None, map(_tokenizer_in, [*reversed(later), run / "tokenizer"])), None)


def _tokenizer_in(folder: Path) -> Path | None:
    if not is_folder(folder, follow=False):
        return None
    found = [path for path in folder.glob("*") if path.suffix in (".model", ".json") and not path.is_symlink()]
    return next((path for path in found if path.name not in COMPANION_FILES), None)


def tokenizer_files(path: Path, end: int | None) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Files to write and files to copy for the tokenizer `path`; `end`: the id that ends documents, if it is known.

    With them, transformers encodes as the run did: text that spells a special token is text, and no token begins a
    text, as none was trained to. Raises InputError if the tokenizer cannot be read.
    """
    tokenizer = open_tokenizer_file(path)
    end = tokenizer.eod if end is None else end
    texts = {} if end is None else {GENERATION_CONFIG: _json({"eos_token_id": end, "pad_token_id": end})}
    texts["tokenizer_config.json"] = _json(SETTINGS | ({} if end is None else {"eos_token": tokenizer.piece(end)}))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        changed = tokenizer.without_additions()
        return (texts, {"tokenizer.json": path}) if changed is None else (texts | {"tokenizer.json": changed}, {})
    return texts | {"tokenizer.json": tokenizer_json(path, path.read_bytes())}, {"tokenizer.model": path}


def doubts(found: Weights, model_type: str | None = None) -> tuple[str, ...]:
    """Warnings of a run's tokenizer that transformers does not read as the run did; model_type: of its `config.json`.

    Raises InputError if it cannot be read.
    """
    path, warnings = found.tokenizer, []
    if path is None or found.companions:
        return ()
    tokenizer = open_tokenizer_file(path)  # which bounds its size
    content = path.read_bytes()
    if isinstance(tokenizer, SentencePieceTokenizer):
        content = tokenizer_json(path, content)
        differing = _differing(tokenizer, HuggingFaceTokenizer(path, content))
        if differing is not None:
            rule = f"{path}: no tokenizer.json does all that this SentencePiece model asks for"
            warnings.append(f"{rule}: transformers splits, for example, {differing!a:.200} otherwise")
    if model_type == "qwen2" and json.dumps(QWEN2_WORDS) not in content.decode():
        rule = (
            f"{path}: is not Qwen2's tokenizer, but AutoTokenizer of transformers 5 splits text of all qwen2 models so"
        )
        warnings.append(f"{rule}; open the export's with PreTrainedTokenizerFast.from_pretrained")
    return tuple(warnings)


def _differing(one: Tokenizer, other: Tokenizer) -> str | None:
    """A text that two tokenizers do not encode and decode alike, if they are found to differ."""
    for text in ODD_TEXTS:
        ids = one.encode(text)
        if ids != other.encode(text) or one.decode(ids) != other.decode(ids):
            return text
    return None


def companions_of(found: Weights) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Files to write and files to copy beside weights: those that came with them, or else a run's tokenizer."""
    if found.tokenizer is not None and not found.companions:
        return tokenizer_files(found.tokenizer, found.end)
    return {}, {file.name: file for file in found.companions}


def ends_in(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as a Hugging Face folder tells; the first is that of documents. Raises InputError."""
    found = (
        read_object(folder / GENERATION_CONFIG, MAX_COMPANION_BYTES).get("eos_token_id")
        if is_file(folder / GENERATION_CONFIG)
        else None
    )
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{folder / GENERATION_CONFIG}: eos_token_id = {found!r:.100}: must be an id or a list of ids")
    return tuple(ids)


def _json(fields: Mapping[str, Any]) -> bytes:
    return as_json(fields).encode()
