"""The kill test of experiments in short; `tests/soak/sweep_kills.py` runs the long one."""

import sys
from pathlib import Path

import pytest
import sweep_kills

KILLS = 8


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.timeout(600)  # a machine may be busy
def test_kills_lose_no_run_and_repeat_none(tmp_path: Path) -> None:
    counts = sweep_kills.soak(tmp_path, KILLS, [12, 24, 48], seed=3)
    assert sum(counts.values()) == KILLS
    assert len({part.partition(",")[0] for part in counts}) >= 3, counts
