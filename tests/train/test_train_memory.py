"""What is refused or told before ranks start."""

from pathlib import Path

import pytest

from megalite import cli
from megalite.train import command


def test_a_model_too_big_for_the_machine_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_first_step", lambda config, folder: 0)
    monkeypatch.setattr(command, "check_files", lambda config: None)
    run = [f"run.dir={tmp_path / 'runs'}", "run.device=cpu"]
    assert cli.main(["train", *run, "model.width=65536", "model.layers=100"]) == 2
    told = capsys.readouterr().err
    assert "all ranks together would need" in told
    assert "of this machine's memory (of the fullest rank: optimizer states" in told
    assert not (tmp_path / "runs").exists()
