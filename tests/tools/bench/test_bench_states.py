"""`megalite-bench-states`, on states small enough for a test."""

import json
from pathlib import Path

import pytest

from megalite_tools.bench import states as bench_states
from megalite_tools.bench.states import main


def test_a_pass_and_a_step_stand_beside_dd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_states, "ELEMENTS", 1 << 19)
    out = tmp_path / "states.json"
    assert main(["--folder", str(tmp_path), "--rounds", "1", "--parameters", "2", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["bytes"] == 2 * 2 * 4 << 19
    rates = report["bytes_per_second"]
    seconds = {way: times[0] for way, times in report["seconds"].items()}
    assert rates["states, a pass"] == pytest.approx(2 * report["bytes"] / seconds["states, a pass"])
    both = 2 * report["bytes"] / (seconds["dd, write"] + seconds["dd, read"])
    assert report["share_of_dd"] == pytest.approx(rates["states, a pass"] / both)
    assert [path.name for path in tmp_path.iterdir()] == ["states.json"]


@pytest.mark.parametrize(
    ("given", "message"), [(["--rounds", "0"], "--rounds must be at least 1"), (["--folder", "none"], "no such folder")]
)
def test_bad_input(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    assert message in capsys.readouterr().err
