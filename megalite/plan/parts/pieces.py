"""Number of pieces in which ranks of tensor parallelism gather and scatter activations beside matrix products.

Imports no torch: layers and the prediction of traffic ask the same.
"""

MAX_PIECES = 4  # a power of two: more hide little more, and every product of a piece is a smaller one
MIN_PIECE_BYTES = 16 << 20  # over all ranks: 40 µs on NVLink, as the host needs to launch what a piece adds


def pieces(positions: int, size: int) -> int:
    """The pieces into which a rank's part of a sequence is cut, all of `size` bytes on all ranks; 1: nothing pays.

    positions: of the part.
    """
    n = MAX_PIECES
    while n > 1 and (positions % n or size < n * MIN_PIECE_BYTES):
        n //= 2
    return n
