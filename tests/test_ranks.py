"""Threads of the ranks that tests share."""

import os
import sys

import pytest
import torch.distributed as dist
from ranks import SIZE, THREADS, Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def threads_of_a_group() -> int:
    """How many more threads this rank has with one more group."""
    before = len(os.listdir("/proc/self/task"))
    dist.new_group(group_desc="checkpoints of this test")  # which no other test shares
    return len(os.listdir("/proc/self/task")) - before


def test_groups_share_the_thread_that_reads_from_other_ranks(ranks: Ranks) -> None:
    assert ranks.run(threads_of_a_group) == [THREADS] * SIZE
