"""The kill test in short; `make soak` runs the long one."""

import json
import sys
from pathlib import Path

import pytest
import soak

KILLS = 3
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.timeout(900),  # a machine may be busy
]


@pytest.mark.parametrize("kind", ["changing", "local", "files"])
def test_a_killed_run_ends_as_its_twin(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Changing its layout; in the same one, tests/checkpoint and tests/train resume to the bit."""
    out = tmp_path / "soak.md"
    where = ["--work", str(tmp_path / "work"), "--out", str(out)]
    what = ["--only", kind, "--kills", str(KILLS), "--ranks", "2", "--seed", "1"]
    assert soak.main([*what, *where]) == 0, capfd.readouterr().err
    result = json.loads(out.with_suffix(".json").read_text())
    assert result["kills"] == KILLS
    assert result["inside_a_save"] >= 1
    assert result["resumes"] >= 2
    assert all(run["kind"] == kind and min(run["epochs"]) > 2 for run in result["runs"])
    assert f"{KILLS} kills" in out.read_text()
