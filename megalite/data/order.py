"""The order of samples as pure functions: a permutation and a mixture evaluated at one index, without a table."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from hashlib import blake2b

ROUNDS = 8


def order_key(seed: int, source: int, epoch: int) -> bytes:
    """The key under which one epoch of one source is shuffled."""
    return blake2b(f"{seed}/{source}/{epoch}".encode(), digest_size=32).digest()


def permute(index: int, size: int, key: bytes) -> int:
    """The image of `index` under a pseudo-random permutation of range(size) chosen by `key`; size up to 2**48.

    A balanced Feistel network over the smallest even number of bits that holds `size`. It is applied again until the
    result is in range: at most four times the work on average (Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002).
    """
    if not 0 <= index < size <= 1 << 48:
        raise ValueError(f"index {index} of a permutation of {size}")
    half = max(1, math.ceil((size - 1).bit_length() / 2))
    while True:
        index = _feistel(index, half, key)
        if index < size:
            return index


def _feistel(index: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for number in range(ROUNDS):
        block = number.to_bytes(1, "little") + right.to_bytes(3, "little")
        mixed = int.from_bytes(blake2b(block, key=key, digest_size=4).digest(), "little")
        left, right = right, left ^ (mixed & mask)
    return left << half | right


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the same proportions. A weight counts as the decimal number that it is printed as."""
    fractions = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * unit) for fraction in fractions]
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


def mixture(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """The source that sample `index` comes from, and the number of the sample within that source, from 0.

    In every prefix, source j's count is less than one below its exact share and at most 1 + ½ + … + 1/(k−1) above it,
    for k sources. The cost depends on k, not on `index`.
    """
    for source, weight, rest in _descending(weights):
        taken = index * weight // rest
        if (index + 1) * weight // rest > taken:
            return source, taken
        index -= taken
    raise ValueError(f"weights {tuple(weights)} have no positive sum")


def mixture_counts(samples: int, weights: Sequence[int]) -> list[int]:
    """Count how many of the first `samples` samples come from each source."""
    counts = [0] * len(weights)
    for source, weight, rest in _descending(weights):
        counts[source] = samples * weight // rest
        samples -= counts[source]
    return counts


def _descending(weights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Sources from heavy to light: (source, weight, weight of it and all after). The error bound needs this order."""
    rest = sum(weights)
    for source in sorted(range(len(weights)), key=lambda source: -weights[source]):
        if weights[source] > 0:
            yield source, weights[source], rest
            rest -= weights[source]
