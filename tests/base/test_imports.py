"""Importing for good."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.base.late_import import import_for_good


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that notes whether the collector is at work while it is imported."""
    (tmp_path / "long_lived.py").write_text(
        "import gc\ncollects = gc.isenabled()\nobjects = [[] for _ in range(1000)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "long_lived"
    sys.modules.pop("long_lived", None)


def test_the_collector_neither_works_meanwhile_nor_looks_at_it_later(module: str) -> None:
    before = gc.get_freeze_count()
    imported = import_for_good(module)
    assert imported is sys.modules[module]
    assert not imported.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 1000


def test_a_collector_that_rested_before_rests_on(module: str) -> None:
    gc.disable()
    try:
        import_for_good(module)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_works_again_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_for_good("no_such_module")
    assert gc.isenabled()
