"""The mask of a token store, in its `PREFIX.mask`: one bit per token, 1 where training counts the token as a target.

Bits fill bytes from the lowest; those after the last token are 0. A store without a mask has no such file: all of its
tokens are trained.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.base.errors import InputError
from megalite.data.data_file import DataFile, Range


def mask_file(prefix: str | Path) -> Path:
    """The path of a store's mask."""
    return Path(f"{prefix}.mask")


class Mask:
    """A mask of `tokens` tokens. Raises InputError if the file is not one."""

    def __init__(self, file: DataFile, tokens: int) -> None:
        self.file, self.tokens = file, tokens
        size, expected = file.size, -(-tokens // 8)
        if size != expected:
            raise self._broken(f"{size} bytes", f"{expected} for {tokens} tokens")
        if tokens % 8:
            (last,) = file.read([(size - 1, size)])
            if last[0] >> tokens % 8:
                raise self._broken(f"last byte 0x{last[0]:02x}", f"0 in the bits after token {tokens - 1}")

    def read(self, ranges: Sequence[Range]) -> list[NDArray[np.bool_]]:
        """The bits of the tokens in each range: whether each is trained."""
        found = self.file.read([(start // 8, -(-stop // 8)) for start, stop in ranges])
        bits = (np.unpackbits(each, bitorder="little") for each in found)
        cut = zip(ranges, bits, strict=True)
        return [each[start % 8 :][: stop - start].view(np.bool_) for (start, stop), each in cut]

    def _broken(self, found: str, expected: str) -> InputError:
        return InputError(
            f"{self.file.name}: found {found}, expected {expected}; the mask is damaged or of another store"
        )


class MaskBits:
    """Packs the bits of a mask that come in pieces, and counts the tokens that are trained."""

    def __init__(self) -> None:
        self.trained = 0
        self._rest = np.empty(0, np.bool_)

    def add(self, trained: NDArray[np.bool_]) -> bytes:
        """The bytes that these bits complete."""
        self.trained += int(trained.sum())
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._rest = bits[whole:]
        return np.packbits(bits[:whole], bitorder="little").tobytes()

    def end(self) -> bytes:
        """The last, incomplete byte, if there is one."""
        return np.packbits(self._rest, bitorder="little").tobytes()
