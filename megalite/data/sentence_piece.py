"""The file of a SentencePiece model: the message ModelProto of protocol buffers, of which little has to be known."""

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

NORMAL_PIECE, UNKNOWN_PIECE, CONTROL_PIECE, USER_DEFINED_PIECE, UNUSED_PIECE, BYTE_PIECE = range(
    1, 7
)  # kinds of pieces
UNIGRAM_MODEL = 1  # a kind of model
STEPS = 64  # scores are multiples of 1 / STEPS


@dataclass(frozen=True)
class PieceModel:
    """Content of a model's file that decides how text is split."""

    pieces: list[tuple[str, float, int]]  # name, score and kind
    kind: int
    to_bytes: bool  # whether a character without a piece becomes its bytes
    unknown: str  # text of an unknown piece when it is decoded
    charsmap: bytes  # normalization; empty: there is none
    prefix: bool  # whether a blank is put before every text
    one_blank: bool  # whether blanks at both ends are dropped, and of several only one is kept


def read_model(content: bytes) -> PieceModel:
    """Parse a file that SentencePiece itself has read without complaint."""
    whole = _values(content)
    trainer, normalizer = (_values(b"".join(whole[number])) for number in (2, 3))
    pieces = []
    for piece in map(_values, whole[1]):
        (score,) = struct.unpack("<f", _last(piece, 2, bytes(4)))
        pieces.append((_last(piece, 1, b"").decode(), score, _last(piece, 3, NORMAL_PIECE)))
    return PieceModel(
        pieces,
        kind=_last(trainer, 3, UNIGRAM_MODEL),
        to_bytes=bool(_last(trainer, 35, 0)),
        unknown=_last(trainer, 44, " \u2047 ".encode()).decode(),
        charsmap=_last(normalizer, 2, b""),
        prefix=bool(_last(normalizer, 3, 1)),
        one_blank=bool(_last(normalizer, 4, 1)),
    )


def with_short_scores(content: bytes) -> bytes:
    """A unigram model whose scores are multiples of 1/STEPS, so that float32 has the sums of those of a long text.

    SentencePiece adds in float32 and other programs in float64. Where two ways to split a text are as likely, as in
    runs of one character, what is rounded decides: without that, all choose alike.
    """
    found = bytearray(content)
    for number, _, start, end in _fields(content):
        if number == 1:
            for inner, _, at, _ in _fields(content[start:end]):
                if inner == 2:
                    (score,) = struct.unpack_from("<f", content, start + at)
                    struct.pack_into("<f", found, start + at, round(score * STEPS) / STEPS)
    return bytes(found)


def without_prefix(content: bytes) -> bytes:
    """The model that puts no blank before a text. A field that comes again replaces the one before."""
    return content + b"\x1a\x02\x18\x00"


def encoded_pieces(message: bytes) -> list[tuple[int, int, int]]:
    """The id of each piece of a text, and the bytes of the text that it is of, in what SentencePiece has serialized.

    Only the last of the pieces that are single bytes of a character has its bytes; the others have none.
    """
    pieces = map(_values, _values(message)[2])
    return [(_last(piece, 2, 0), _last(piece, 4, 0), _last(piece, 5, 0)) for piece in pieces]


def _values(message: bytes) -> dict[int, list[Any]]:
    """The values of a message's fields, by number: whole numbers, and all else as bytes."""
    found: dict[int, list[Any]] = defaultdict(list)
    for number, whole, start, end in _fields(message):
        found[number].append(message[start:end] if whole is None else whole)
    return found


def _last(values: dict[int, list[Any]], number: int, default: Any) -> Any:
    """The value of a field, which may be given several times."""
    return values[number][-1] if number in values else default


def _fields(message: bytes) -> Iterator[tuple[int, int | None, int, int]]:
    """The number of every field, its value if that is a whole number, and where else it begins and ends."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key % 8 == 0:
            value, at = _varint(message, at)
            yield key // 8, value, at, at
            continue
        size, at = _varint(message, at) if key % 8 == 2 else ({1: 8, 5: 4}[key % 8], at)
        yield key // 8, None, at, at + size
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A whole number of seven bits in each byte, and where it ends."""
    value = 0
    for place in count():
        value |= (message[at + place] & 127) << 7 * place
        if message[at + place] < 128:
            return value, at + place + 1
    raise AssertionError("endless")
