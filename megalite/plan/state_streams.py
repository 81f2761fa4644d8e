"""Sizes of the buffers through which tensors outside of the device pass, and of the files that hold states.

States in host memory or in files visit the device bucket by bucket: one arrives, one is updated and one leaves.
"""

BLOCK = 4096  # bytes to which places in files and buffers are aligned, as O_DIRECT asks
BUCKET_BYTES = 32 << 20  # states of a bucket: so many that links and drives reach their rates
DEVICE_SLOTS = 3  # buckets on the device at once: arriving, updated, leaving
CAST_BYTES = 4 << 20  # bytes of parameters that are cast at once when they arrive from the host
FILE_SLOTS = 4  # buckets in host memory on their way from and to files: two are read ahead


def padded(size: int) -> int:
    """The bytes that `size` bytes take in a file or a buffer: whole blocks."""
    return -(-size // BLOCK) * BLOCK


def slot_bytes(largest: int) -> int:
    """The bytes of one slot for a bucket. largest: bytes of the largest state that must be whole on the device."""
    return max(BUCKET_BYTES, padded(largest))
