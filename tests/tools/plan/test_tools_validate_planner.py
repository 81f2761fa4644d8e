"""`megalite-validate-planner` as people run it."""

import json
from pathlib import Path

import pytest
from commands import in_process

from megalite_tools.plan.validate_planner import main

FOLDER = Path(__file__).parents[2] / "planner" / "published"


def test_errors_by_source_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "simumax_b200")]
    code, out, _ = in_process(main, capsys)(*files, "--json", tmp_path / "errors.json", "--worst")
    assert code == 0
    assert "Korthikanti22 T5" in out
    assert "6 rows cannot be predicted, the first: " in out
    report = json.loads((tmp_path / "errors.json").read_text())
    assert report["time"]["rows"] == len(report["rows"]) == 21
    assert sum(of["time"]["rows"] for of in report["by_source"].values()) == 21
    errors = [abs(row["error"]) for row in report["rows"]]
    assert report["time"]["mean_abs_error"] == pytest.approx(sum(errors) / len(errors))
    assert len(report["left_out"]) == 6


def test_a_source_can_be_predicted_from_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "simumax_b200")]
    report = tmp_path / "errors.json"
    assert in_process(main, capsys)(*files, "--leave-out", "--json", report)[0] == 0
    fitted_without = json.loads(report.read_text())["time"]["mean_abs_error"]
    assert in_process(main, capsys)(*files, "--json", report)[0] == 0
    assert fitted_without > json.loads(report.read_text())["time"]["mean_abs_error"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["none.csv"], "none.csv: cannot be read"), ([FOLDER / "simumax_b200.csv", "--json", "."], "is a folder")],
)
def test_bad_input_is_one_message(arguments: list[object], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = in_process(main, capsys)(*arguments)
    assert code == 2
    assert told in err
