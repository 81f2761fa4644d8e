"""How the ranks that tests share, and their threads, get the cores."""

import os
import sys

import pytest
import torch.distributed as dist
from ranks import SIZE, THREADS, Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks Linux for its policy")


def threads_of_a_group() -> int:
    """How many more threads this rank has with one more group."""
    before = len(os.listdir("/proc/self/task"))
    dist.new_group(group_desc="checkpoints of this test")  # which no other test shares
    return len(os.listdir("/proc/self/task")) - before


def test_groups_share_the_thread_that_reads_from_other_ranks(ranks: Ranks) -> None:
    assert ranks.run(threads_of_a_group) == [THREADS] * SIZE


def test_tests_and_what_they_start_are_batch_jobs_to_linux() -> None:
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
