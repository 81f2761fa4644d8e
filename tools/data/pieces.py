"""Cuts long texts into pieces that can be tokenized separately, with the same tokens as the whole text.

A tokenizer may merge characters across any place, so every cut is checked. A cut is made only if it changes no token
within WINDOW characters on either side. If none of the tried cuts is possible, the piece becomes longer. Beginnings of
lines and of words are tried first: there, few tokenizers look further back than the word before.
"""

import re
from collections.abc import Iterator
from itertools import islice

from megalite.data.tokenizer import Tokenizer

PIECE = 1 << 18  # characters, at least
WINDOW = 1 << 11
SPAN = 1 << 14  # characters in which to try one kind of cut before the next
TRIES = 4  # tries of each kind of cut
CUTS = tuple(map(re.compile, (r"(?<=\S)\n(?=\w)", r"(?<=\S) (?=\w)", r"(?<=\W)(?=\w)", "")))


def pieces(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """`text` in pieces whose tokens, end to end, are the tokens of `text`."""
    start = 0
    while (cut := _next_cut(text, start + PIECE, tokenizer)) is not None:
        end, following = cut
        yield text[start:end]
        start = following
    yield text[start:]


def _next_cut(text: str, begin: int, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The end of a piece, at `begin` or later, and the begin of the next; a space between them may be left out."""
    while begin < len(text) - WINDOW:
        for cut in CUTS:
            for match in islice(cut.finditer(text, begin, min(begin + SPAN, len(text) - WINDOW)), TRIES):
                first, last = match.span()
                # A tokenizer that puts a space before every text restores the space that is left out.
                for end, following in dict.fromkeys(((last, last), (first, first), (first, last))):
                    if match.group() == "\n" and end != following:
                        continue
                    if _changes_nothing(text, end, following, tokenizer):
                        return end, following
        begin += SPAN
    return None


def _changes_nothing(text: str, end: int, following: int, tokenizer: Tokenizer) -> bool:
    # Two lengths before the cut, since merges in a run may depend on where the run begins: by twos or threes, say.
    after = text[following : following + WINDOW]
    for length in (WINDOW, WINDOW - 1):
        before = text[max(0, end - length) : end]
        whole = text[max(0, end - length) : following + WINDOW]
        if tokenizer.encode(before) + tokenizer.encode(after) != tokenizer.encode(whole):
            return False
    return True
