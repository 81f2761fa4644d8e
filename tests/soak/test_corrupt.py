"""The corruption campaign in short; `make corrupt` runs all of it."""

import os
import signal
import sys
import time

import corrupt
import pytest
from corruptions import cases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="links to devices of Linux")
SAMPLE = (
    "a file of step-00000030, index.bin: a link to /dev/zero",
    "several checkpoints, manifest.json of 2",
    "pickles, hashes right, __0_0.distcp: runs a command",
    "format 1, hashes right, .metadata: forty dimensions",
    "a folder, step-00000040: a link to a whole one elsewhere",
)


def test_corrupted_run_folders_go_on_from_what_is_intact() -> None:
    chosen = [case for case in cases() if f"{case.group}, {case.name}" in SAMPLE]
    assert len(chosen) == len(SAMPLE)
    outcomes, violations = corrupt.campaign(chosen, 2, lambda _: None)
    assert violations == []
    assert [outcome for _, outcome in outcomes] == ["from 20", "from 10", "refused", "from 30", "from 30"]
    table = corrupt.page(outcomes, 1.0)
    assert "| **all** | 5 | 2 | 1 | 1 |  | 1 |" in table


def test_a_campaign_notices_what_it_looks_for(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("called")

    def raises(arguments: list[str]) -> int:
        raise KeyError(arguments[0])

    ended = corrupt.call(raises, ["x"], folder)
    assert corrupt.broken(ended) == ["traceback"]
    with monkeypatch.context() as short:
        short.setattr(corrupt, "LIMIT", 0.2)
        ended = corrupt.call(lambda _: time.sleep(60) or 0, [], folder)
    assert corrupt.broken(ended) == ["does not end"]
    ended = corrupt.call(lambda _: os.kill(os.getpid(), signal.SIGKILL) or 0, [], folder)
    assert corrupt.broken(ended) == [f"exit code {-signal.SIGKILL}"]
