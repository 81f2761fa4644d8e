"""Programs are given paths at which the system does not tell what is there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megalite_tools.bench import checkpoint as bench_checkpoint
from megalite_tools.checkpoint import inspect_checkpoint
from megalite_tools.data import inspect_data, prepare_data, train_tokenizer

LONG = "x" * 300


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (inspect_data.main, [LONG]),
        (inspect_checkpoint.main, ["list", LONG]),
        (inspect_checkpoint.main, ["verify", LONG]),
        (inspect_checkpoint.main, ["index", LONG]),
        (prepare_data.main, [".", "--tokenizer", f"{LONG}.model", "--out", "out"]),
        (train_tokenizer.main, [LONG, "--vocab-size", "300", "--out", "out.model"]),
        (train_tokenizer.main, [".", "--vocab-size", "300", "--out", f"{LONG}.model"]),
        (bench_checkpoint.main, ["--folder", LONG]),
    ],
)
def test_a_name_that_is_too_long_is_bad_input(
    main: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith("cannot be looked at: File name too long; use a shorter name\n")
    assert list(tmp_path.iterdir()) == []
