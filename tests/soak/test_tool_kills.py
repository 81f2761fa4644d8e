"""The kill test of tools in short; `python tests/soak/tool_kills.py` runs the long one."""

import random
from pathlib import Path

import pytest
import tool_kills
import torch


@pytest.mark.timeout(600)  # a machine may be busy
def test_killed_tools_leave_all_or_nothing(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        told = [*tool_kills.kill_all(tmp_path, 1, random.Random(1))]
    finally:
        torch.set_num_threads(threads)
    assert [early + done for _, early, done in told] == [1, 1, 1]
