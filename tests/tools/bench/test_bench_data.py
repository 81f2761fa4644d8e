"""`megalite-bench-data`, with a second store on a disk in place of one on a server."""

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.data.store_writer import StoreWriter
from megalite_tools.bench.data import main

SMALL = ["--sequence-length", "16", "--batch", "2", "--batches", "2", "--rounds", "3", "--step", "0.001"]


@pytest.fixture
def stores(tmp_path: Path) -> tuple[str, str]:
    for name, first in (("a", 0), ("b", 1)):
        with StoreWriter(tmp_path / name, "uint16") as writer:
            writer.add(np.arange(first, 200))
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_both_are_timed_in_turn(stores: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    assert main([stores[0], stores[0], *SMALL, "--cache", str(tmp_path), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    for name, times in (("warm_to_disk", "rounds"), ("warm_to_disk_with_steps", "rounds_with_steps")):
        rounds = report[times]
        ratios = [server / disk for server, disk in zip(rounds["server"], rounds["disk"], strict=True)]
        assert report[name] == pytest.approx(np.median(ratios))
        assert len(ratios) == 3
    assert min(map(min, report["rounds_with_steps"].values())) >= report["step_seconds"] == 0.001


def test_bad_input(stores: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*stores, *SMALL, "--cache", str(tmp_path)]) == 2
    assert f"{stores[1]}: batch 0 is not that of {stores[0]}" in capsys.readouterr().err
    assert main([*stores, "--rounds", "0"]) == 2
    assert main([*stores, "--step", "-1"]) == 2
    assert "--step -1.0: must be 0 to 60 seconds" in capsys.readouterr().err
