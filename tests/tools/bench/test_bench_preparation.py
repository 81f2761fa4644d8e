"""`megalite-bench-preparation`, with two documents."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite_tools.bench import preparation
from megalite_tools.bench.preparation import ONE, main
from megalite_tools.data.train_tokenizer import train_model


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"{number}.txt") for number in range(2)]
    for number, name in enumerate(names):
        Path(name).write_text("hello world\n" * (5 + number))
    (tmp_path / "t.model").write_bytes(train_model(["hello world\n"] * 200, vocab_size=270, kind="bpe", lines=200))
    more = ["--rounds", "1", "--shards", "2", "--folder", str(tmp_path), "--out", str(tmp_path / "rates.json")]
    return [*names, "--tokenizer", str(tmp_path / "t.model"), *more]


def test_rates_are_documents_by_processor_time(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    report = json.loads((tmp_path / "rates.json").read_text())
    assert report["documents"] == 2
    (seconds,) = report["rounds"]
    assert len(seconds) == 3
    for way, found in seconds.items():
        assert report["documents_per_core_second"][way] == pytest.approx(2 / found["core"])
        assert report["to_one_process"][way] == pytest.approx(seconds[ONE]["core"] / found["core"])
    one, two = (seconds[f"engine local, {workers}"]["core"] for workers in ("1 worker", "2 workers"))
    assert two > 1.3 * one > 0.1  # workers count, whose imports take nearly all of the time here
    assert "documents per second of a core" in capsys.readouterr().out


def test_bad_input_is_told(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*given, "--rounds", "0"]) == 2
    assert "--shards and --rounds must be at least 1" in capsys.readouterr().err
    assert main([*given, "--tokenizer", "gone.model"]) == 2
    assert "gone.model: no such tokenizer file" in capsys.readouterr().err
    counts = iter([(5, 9), (5, 9), (4, 9)])
    monkeypatch.setattr(preparation, "_seconds", lambda arguments: {"core": 1.0, "clock": 1.0})
    monkeypatch.setattr(
        preparation,
        "open_store",
        lambda path: SimpleNamespace(**dict(zip(("documents", "tokens"), next(counts), strict=True))),
    )
    assert main(given) == 2
    assert "engine local, 2 workers: made 4 documents of 9 tokens, and one process 5 of 9" in capsys.readouterr().err
