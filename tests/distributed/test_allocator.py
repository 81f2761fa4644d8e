"""Memory that ranks on a CPU keep, seen by the pages that the system has to clear."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from resource import RUSAGE_SELF, getrusage

from megalite.distributed.start.allocator import keep_freed_memory


def cleared() -> int:
    before = getrusage(RUSAGE_SELF).ru_minflt
    bytearray(1 << 27)
    return getrusage(RUSAGE_SELF).ru_minflt - before


PR_SET_THP_DISABLE = 41  # a huge page would count as one, and many systems give them to everybody
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
print(keep_freed_memory(), cleared(), cleared())
"""
PAGES = (1 << 27) // os.sysconf("SC_PAGESIZE")

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="is glibc's")


def run(**variables: str) -> tuple[str, int, int]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=True, timeout=60)
    told, *counts = done.stdout.split()
    first, second = map(int, counts)
    return told, first, second


def test_what_was_freed_is_there_for_the_next_allocation() -> None:
    told, first, second = run()
    assert told == "True"
    assert first > PAGES / 2
    assert second < PAGES / 100


@pytest.mark.parametrize(
    "variables", [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}]
)
def test_an_environment_that_tunes_the_allocator_stands(variables: dict[str, str]) -> None:
    told, first, second = run(**variables)
    assert told == "False"
    assert min(first, second) > PAGES / 2
