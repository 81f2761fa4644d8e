"""Encodes text in which special tokens stand for themselves with a SentencePiece model, as transformers does.

SentencePiece takes control pieces in a text for plain text, so the text is cut at them. Each part between two is
encoded on its own.
"""

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import sentencepiece

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object
from megalite.data.sentence_piece import CONTROL_PIECE, USER_DEFINED_PIECE, encoded_pieces, read_model, without_prefix

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MAX_BYTES = 16 << 20  # bytes of a companion


class MarkedPieces:
    """A model with its special tokens: control pieces, and all that files beside it declare.

    special: their names. written: pieces that the model finds in every text, which a template may use as marks.
    Raises InputError for a model that would drop blanks beside special tokens.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        model = read_model(content)
        if model.one_blank:
            rule = "this model drops blanks at the ends of a text, so none is kept beside special tokens"
            raise InputError(f"{path}: {rule}; for chat templates, use a tokenizer.json")
        kinds = {name: kind for name, _, kind in model.pieces}
        config = path.with_name(COMPANIONS[0])
        self._path = path
        self._known = {name for name, kind in kinds.items() if kind in (CONTROL_PIECE, USER_DEFINED_PIECE)}
        self._always = exists(config) and read_object(config, MAX_BYTES).get("legacy") is True
        declared = {name for file in map(path.with_name, COMPANIONS) for name in _names(file)}
        self.special = tuple(sorted({name for name, kind in kinds.items() if kind == CONTROL_PIECE} | declared))
        self.written = tuple(name for name, kind in kinds.items() if kind == USER_DEFINED_PIECE)
        names = sorted({*self.special, *self.written}, key=len, reverse=True)
        self._cuts = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._first, self._later = (_processor(each) for each in (content, without_prefix(content)))

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, and the characters that each is of. Raises InputError for a special token that is no piece."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for found in self._cuts.finditer(text):
            self._add(text[at : found.start()], at, ids, offsets)
            if found.group() not in self._known:
                rule = f"the special token {found.group()!r} of a file beside it is no piece of this model"
                raise InputError(f"{self._path}: {rule}; for chat templates, use the tokenizer.json that has it")
            ids.append(self._later.piece_to_id(found.group()))
            offsets.append(found.span())
            at = found.end()
        self._add(text[at:], at, ids, offsets)
        return ids, offsets

    def _add(self, part: str, at: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        """Add the tokens of the text between two special tokens, which begins at character `at`."""
        if not part:
            return
        model = self._first if at == 0 or self._always else self._later
        pieces = encoded_pieces(model.encode(part, out_type="serialized_proto"))
        raw = part.encode()
        place = list(accumulate((byte & 0xC0 != 0x80 for byte in raw), initial=0))  # bytes to characters before them
        end = None
        spans = []
        for _, start, stop in reversed(pieces):  # the last of the bytes of a character has all of it
            end = stop if stop > start or end is None else end
            spans.append((at + place[start], at + place[end]))
        ids += [token for token, _, _ in pieces]
        offsets += reversed(spans)


def _processor(content: bytes) -> Any:
    model = sentencepiece.SentencePieceProcessor()
    model.load_from_serialized_proto(content)
    return model


def _names(file: Path) -> Iterator[str]:
    """Names of the special tokens that a file beside a model declares, but not the one for what is unknown."""
    found = read_object(file, MAX_BYTES) if exists(file) else {}
    if file.name == COMPANIONS[2]:
        yield from filter(None, found)
        return
    several, numbered = found.get("additional_special_tokens"), found.get("added_tokens_decoder")
    values = [value for name, value in found.items() if name.endswith("_token")]
    values += several if isinstance(several, list) else []
    values += [
        value
        for value in (numbered.values() if isinstance(numbered, dict) else ())
        if isinstance(value, dict) and value.get("special") is True
    ]
    yield from {_content(value) for value in values} - {"", _content(found.get("unk_token"))}


def _content(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
