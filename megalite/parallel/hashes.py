"""Hashes of whole numbers, of which random choices are made that hang on a name and a place alone.

They are those of a counter-based generator (SplitMix64: Steele, Lea and Flood 2014), in int64 arithmetic, so they are
the same on every device.
"""

import hashlib

from torch import Tensor


def start_of(name: str) -> int:
    """The start of the hashes that belong to `name`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def splitmix(start: int, index: Tensor) -> Tensor:
    """The 64-bit hash of every index, in int64 arithmetic that wraps around."""
    z = (index + 1).mul_(signed(0x9E3779B97F4A7C15)).add_(start)
    z.bitwise_xor_(_shift(z, 30)).mul_(signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift(z, 27)).mul_(signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift(z, 31))


def signed(word: int) -> int:
    """The signed integer with the same 64 bits as the unsigned `word`, as torch has no unsigned arithmetic."""
    return word - (1 << 64) if word >> 63 else word


def _shift(z: Tensor, by: int) -> Tensor:
    """Right shift that fills with zeros; torch's own copies the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
