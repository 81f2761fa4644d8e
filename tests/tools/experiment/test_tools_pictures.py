"""What the programs that draw have in common: formats, folders, and what is told where a picture cannot be."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megalite_tools.experiment import plot_layouts, plot_metrics

PROGRAMS = pytest.mark.parametrize("main", [plot_layouts.main, plot_metrics.main])
Main = Callable[[list[str]], int]


@pytest.fixture
def run(tmp_path: Path) -> str:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    return str(tmp_path)


@PROGRAMS
@pytest.mark.parametrize("suffix", ["png", "SVG", "pdf"])
def test_the_name_decides_the_format_and_the_folder_is_made(main: Main, run: str, suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"new/x.{suffix}"
    assert main([run, "--out", str(out)]) == 0
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


@PROGRAMS
@pytest.mark.parametrize("out", ["x.docx", "metrics.jsonl/x.png"])
def test_a_picture_that_cannot_be_written_exits_with_2(
    main: Main, run: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([run, "--out", str(tmp_path / out)]) == 2
    assert f"error: {tmp_path / out}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@PROGRAMS
def test_matplotlib_is_asked_for_where_it_is_missing(
    main: Main, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.report.pictures.pyplot", None)
    assert main([run, "--out", str(tmp_path / "x.png")]) == 2
    assert "pip install 'megalite[plot]'" in capsys.readouterr().err
