"""Garbage is collected after the same steps on all ranks, and otherwise where there is no step."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import toy_runs
from toy_jobs import MODEL, config_of, one_rank

from megalite.config.layout import Layout
from megalite.config.schema import Checkpoint, Eval
from megalite.train import loop
from megalite.train.garbage import Garbage


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_between_collections_nothing_is_collected() -> None:
    with Garbage(3) as garbage:
        left = weakref.ref(Node())
        [[] for _ in range(10_000)]
        for step in (1, 2):
            garbage.stepped(step)
        assert left() is not None
        assert not gc.isenabled()
        garbage.stepped(3)
        assert left() is None


def test_a_pause_frees_and_collects_as_before() -> None:
    with Garbage(3) as garbage:
        left = weakref.ref(Node())
        with garbage.pause():
            assert left() is None
            assert gc.isenabled()
        assert not gc.isenabled()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("interval", [0, 3])
def test_afterwards_the_collector_is_as_it_was(before: bool, interval: int) -> None:
    if not before:
        gc.disable()
    with pytest.raises(KeyError):
        _fail(interval, before)
    assert gc.isenabled() == before


def _fail(interval: int, before: bool) -> None:
    with Garbage(interval) as garbage:
        assert gc.isenabled() == (before and not interval)
        with garbage.pause():
            assert gc.isenabled() == before
            raise KeyError


def test_with_0_python_decides() -> None:
    with Garbage(0) as garbage:
        left = weakref.ref(Node())
        garbage.stepped(50)
        with garbage.pause():
            assert left() is not None


@pytest.mark.parametrize(("interval", "collected"), [(2, [0, 0, 2, 3, 4, 6, 6, 6]), (0, [])])
def test_a_run_collects_at_multiples_and_before_what_is_no_step(
    interval: int, collected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collections, each with the steps taken before: at the start, evaluations at 0, 3, 6, the save at 6."""
    base = config_of(Layout(), replace(MODEL, layers=1))
    train = replace(base.train, gc_interval=interval)
    config = replace(base, train=train, eval=Eval(interval=3, steps=1), checkpoint=Checkpoint(interval=0))
    took, found, step, collecting = 0, [], loop.train_step, []

    def counted(*given: object) -> object:
        nonlocal took
        took += 1
        collecting.append(gc.isenabled())
        return step(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", counted)
    monkeypatch.setattr("megalite.train.garbage.gc.collect", lambda: found.append(took))
    with one_rank():
        toy_runs.run(config, tmp_path)
    assert found == collected
    assert collecting == [not interval] * 6
    assert gc.isenabled()
