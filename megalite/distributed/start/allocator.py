"""Memory that a rank on a CPU has freed, which glibc would give back to the system.

The system clears every page that it gives, at the first touch. A step frees its gradients and activations, and the next
one takes as much again: that was 5 % of a step of 268 million parameters on two cores. See mallopt(3).
"""

import ctypes
import os

MMAP_MAX, TRIM_THRESHOLD = -4, -1  # parameters of `mallopt`, of malloc.h
NEVER = -1  # as a threshold


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, for its next allocations. Returns whether it does.

    It does not where the environment tunes glibc's allocator, which then stands, or where libraries are not glibc's.
    Beside another allocator, which was preloaded, it changes nothing.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    tuned = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if tuned or mallopt is None:
        return False
    # Without maps of their own, large blocks are parts of the heap, whose end is given back by the threshold alone.
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, NEVER))
