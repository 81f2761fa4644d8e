"""Resident memory of a process whose states are in files stays below what the prediction tells."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OBJECTS = 16 << 20  # bytes of Python's objects, code and threads, which are no tensors
PLAIN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc keeps nothing that was freed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(300)
def test_training_saving_and_loading_take_no_more_memory_than_is_told(tmp_path: Path) -> None:
    """States and their staged copies are 528 MB in files. In memory they would take more than the bound."""
    for name in ("tiny", "large", "scratch"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, **PLAIN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "resident_memory.py"), str(tmp_path), str(tmp_path / "scratch")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["taken"] <= found["device"] + found["host"] + OBJECTS
    assert found["taken"] > found["host"], "something is measured"
    assert [*(tmp_path / "scratch").iterdir()] == []
