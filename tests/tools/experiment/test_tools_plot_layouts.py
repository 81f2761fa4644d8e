"""The picture of losses in several layouts."""

import json
from pathlib import Path

import pytest

from megalite_tools.experiment.plot_layouts import distances, main, read_losses


def run(folder: Path, *losses: tuple[int, float]) -> Path:
    folder.mkdir()
    records = [{"step": 0, "valid_loss": 9.0}, *({"step": step, "loss": loss} for step, loss in losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_picture_and_the_largest_distances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(tmp_path / "one", (1, 4.0), (2, 2.0)), run(tmp_path / "two", (1, 4.0), (2, 2.002))]
    out = tmp_path / "out.svg"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert "two" in capsys.readouterr().out.split("largest difference 1.0e-03")[0]
    assert "<svg" in out.read_text()


def test_a_repeated_step_counts_once_and_others_are_left_out(tmp_path: Path) -> None:
    first, other = run(tmp_path / "one", (1, 4.0), (2, 2.0)), run(tmp_path / "two", (1, 3.0), (1, 4.0), (3, 1.0))
    assert read_losses(other) == {1: 4.0, 3: 1.0}
    assert distances([read_losses(first), read_losses(other)]) == {1: {1: 0.0}}


def test_bad_input_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = run(tmp_path / "empty")
    assert main([str(empty), "--out", str(tmp_path / "out.svg")]) == 2
    assert "metrics.jsonl: has no losses" in capsys.readouterr().err
