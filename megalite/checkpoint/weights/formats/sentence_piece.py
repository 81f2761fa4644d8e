"""A SentencePiece model as the `tokenizer.json` that transformers reads. Imports no torch."""

import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.data.sentence_piece import (
    CONTROL_PIECE,
    NORMAL_PIECE,
    UNIGRAM_MODEL,
    UNKNOWN_PIECE,
    USER_DEFINED_PIECE,
    PieceModel,
    read_model,
)
from megalite.data.tokenizer import BLANK, tokenizers

EXCLUSION_SCORE = -1e6  # a score so low that no text is encoded as the piece
USER_DEFINED_SCORE = -0.1  # the score that SentencePiece gives to a piece which is whole wherever it stands


@lru_cache(maxsize=1)  # one is written, and then tried
def tokenizer_json(path: Path, content: bytes) -> bytes:
    """The model of the file `path` as a `tokenizer.json` with the same ids.

    Not all that a model can ask for can be said there: try it. Raises InputError if the package for that is missing,
    and for a file that cannot be read.
    """
    if tokenizers is None:
        raise InputError(f"{path}: exporting it needs the package `tokenizers`: pip install 'megalite[hf]'")
    try:
        model = read_model(content)
    except (KeyError, TypeError, IndexError, ValueError, struct.error):  # which SentencePiece itself passes over
        raise InputError(
            f"{path}: has fields that no SentencePiece model has; make it again with the program that trained it"
        ) from None
    found = tokenizers.Tokenizer(_unigram(model) if model.kind == UNIGRAM_MODEL else _bpe(model))
    found.normalizer = _normalizer(model)
    patterns = _lone(model) if model.kind == UNIGRAM_MODEL else _whole(model, found.model)
    if patterns:
        kinds, pattern = tokenizers.pre_tokenizers, tokenizers.Regex
        found.pre_tokenizer = kinds.Sequence([kinds.Split(pattern(each), "isolated") for each in patterns])
        if model.kind != UNIGRAM_MODEL:
            found.model.ignore_merges = True
    found.decoder = _decoder(model)
    special = [tokenizers.AddedToken(name, special=True, normalized=False) for name in _named(model, CONTROL_PIECE)]
    found.add_special_tokens(special)
    return str(found.to_str()).encode()


def _named(model: PieceModel, wanted: int) -> list[str]:
    return [name for name, _, kind in model.pieces if kind == wanted]


def _never(model: PieceModel) -> list[str]:
    """Pieces that no text is encoded as, even if it spells them."""
    return [name for name, _, kind in model.pieces if name and kind not in (NORMAL_PIECE, USER_DEFINED_PIECE)]


def _lone(model: PieceModel) -> list[str]:
    """Pattern to take apart before a unigram model: letters without a piece in text that spells one of `_never`.

    A piece that is unlikely in the extreme is still likelier than letters that are none.
    """
    letters = {name for name in _named(model, NORMAL_PIECE) if len(name) == 1}
    found = []
    for name in _never(model):
        at = next((at for at, letter in enumerate(name) if letter not in letters), None)
        if at is not None:
            before = f"(?<={re.escape(name[:at])})" if at else ""
            found.append(f"{before}{re.escape(name[at])}(?={re.escape(name[at + 1 :])})")
    return ["|".join(found)] if found else []


def _whole(model: PieceModel, merging: Any) -> list[str]:
    """Pattern to take apart before merging, if there are user-defined pieces: they are whole, the longest first.

    Such a piece alone is taken as it is, and so would be text between two that spells one of `_never`: it is cut where
    the first of its merged pieces ends.
    """
    if not (own := _named(model, USER_DEFINED_PIECE)):
        return []
    cuts = []
    for name in _never(model):
        end = len(name.encode()[: merging.tokenize(name)[0].offsets[1]].decode())
        cuts.append(rf"\A{re.escape(name[:end])}(?={re.escape(name[end:])}\z)")
    return ["|".join(map(re.escape, sorted(own, key=len, reverse=True))), *(["|".join(cuts)] if cuts else [])]


def _bpe(model: PieceModel) -> Any:
    """Merges in the order of the scores of what they make: a model of SentencePiece has no list of them."""
    normal = {name: (-score, token) for token, (name, score, kind) in enumerate(model.pieces) if kind == NORMAL_PIECE}
    ranked = [
        (rank, name[:cut], name[cut:])
        for name, rank in normal.items()
        for cut in range(1, len(name))
        if name[:cut] in normal and name[cut:] in normal
    ]
    ranked.sort(key=lambda merge: merge[0])
    return tokenizers.models.BPE(
        {name: token for token, (name, _, _) in enumerate(model.pieces)},
        [merge[1:] for merge in ranked],
        unk_token=next(iter(_named(model, UNKNOWN_PIECE)), None),
        fuse_unk=True,
        byte_fallback=model.to_bytes,
    )


def _unigram(model: PieceModel) -> Any:
    unknown = next((token for token, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN_PIECE), None)
    scored = [
        (name, score if kind == NORMAL_PIECE else USER_DEFINED_SCORE if kind == USER_DEFINED_PIECE else EXCLUSION_SCORE)
        for name, score, kind in model.pieces
    ]
    return tokenizers.models.Unigram(scored, unk_id=unknown, byte_fallback=model.to_bytes)


def _normalizer(model: PieceModel) -> Any:
    kinds, pattern = tokenizers.normalizers, tokenizers.Regex
    steps: list[Any] = [kinds.Precompiled(model.charsmap)] if model.charsmap else []
    if steps and all(steps[0].normalize_str(end) == " " for end in "\r\n"):
        steps.insert(0, kinds.Replace("\r\n", "\n\n"))  # Precompiled takes the two for one character
    if model.one_blank:
        steps += [kinds.Replace(pattern(r"\A +"), ""), kinds.Replace(pattern(" {2,}"), " ")]
    if model.prefix:
        # A text of which nothing is left has a prefix too, but where blanks at the end are dropped.
        steps.insert(len(steps) if model.one_blank else 0, kinds.Prepend(BLANK))
    steps.append(kinds.Replace(" ", BLANK))
    if model.one_blank:
        steps.append(kinds.Replace(pattern(rf"{BLANK}+\z"), ""))
    return kinds.Sequence(steps)


def _decoder(model: PieceModel) -> Any:
    kinds = tokenizers.decoders
    steps: list[Any] = [kinds.Replace(name, model.unknown) for name in _named(model, UNKNOWN_PIECE)]
    steps += [kinds.Replace(BLANK, " "), *([kinds.ByteFallback()] if model.to_bytes else []), kinds.Fuse()]
    return kinds.Sequence([*steps, kinds.Strip(" ", int(model.prefix), 0)])
