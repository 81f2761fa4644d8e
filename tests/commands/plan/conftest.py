"""Fixtures shared by the tests of `megalite plan`."""

from collections.abc import Callable

import pytest

from megalite.commands.main import main

Run = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with these arguments; the answer is what it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        return capsys.readouterr().out

    return run
