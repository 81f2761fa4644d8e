"""`megalite-bench-memory`, on a model small enough for a test."""

import json
from pathlib import Path

import pytest

from megalite_tools.bench import memory as bench_memory
from megalite_tools.bench.memory import main

SMALL = ["layers=2", "width=128", "heads=4", "kv_heads=4", "ffn=320", "vocab_size=1024", "sequence_length=256"]
MODEL = [f"model.{size}" for size in SMALL]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("recompute full", "zero2, 2 ranks")
    monkeypatch.setattr(bench_memory, "SAVERS", {name: bench_memory.SAVERS[name] for name in kept})


@pytest.mark.usefixtures("few")
def test_predictions_stand_beside_what_real_tensors_take(tmp_path: Path) -> None:
    out = tmp_path / "new" / "memory.json"
    assert main([*MODEL, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["rows"]] == ["recompute full", "zero2, 2 ranks"]
    for row in report["rows"]:
        assert row["counted_bytes"] == sum(row["counted_by_kind"].values())
        assert row["difference"] == pytest.approx(row["predicted_bytes"] / row["counted_bytes"] - 1)
        assert abs(row["difference"]) <= report["tolerance"]
    alone, shared = (row["counted_by_kind"]["parameters"] for row in report["rows"])
    assert shared == alone / 2
    assert [path.name for path in out.parent.iterdir()] == ["memory.json"]


def test_a_prediction_that_is_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_memory, "SAVERS", {"nothing saved": ()})
    monkeypatch.setattr(bench_memory, "_count", lambda config: {"parameters": 1000})
    assert main([*MODEL, "--out", str(tmp_path / "memory.json")]) == 1
    assert "off by more than 5%: nothing saved" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "message"), [("model.heads=3", "model.heads = 3"), ("stray", "key=value")])
def test_bad_input(argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    assert main([*MODEL, argument, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
