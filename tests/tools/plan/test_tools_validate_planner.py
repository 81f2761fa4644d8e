"""`megalite-validate-planner` as people run it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import in_process

from megalite.cost.constants import FITTED_CONSTANTS
from megalite_tools.plan.published.fit import BOUNDS
from megalite_tools.plan.validate_planner import main

FOLDER = Path(__file__).with_name("published") / "runs"
PAGE = Path(__file__).parents[3] / "docs" / "planner_evidence.md"


def test_errors_by_source_as_tables_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "simumax_b200")]
    code, out, _ = in_process(main, capsys)(*files, "--json", tmp_path / "errors.json", "--worst")
    assert code == 0
    for part in ("Korthikanti22 T5", "formula", "allocated", "ran out of memory", "memory of row", "groups of layouts"):
        assert part in out
    assert "6 rows cannot be predicted, the first: " in out
    report = json.loads((tmp_path / "errors.json").read_text())
    rows = report["rows"]
    assert len(rows) == report["oom"]["rows"] + report["fits"]["rows"] == 29
    for key, count in (("time", 21), ("memory", 20)):
        found = [row[key] for row in rows if row[key]]
        assert report[key]["rows"] == len(found) == count
        assert report[key]["mean_abs_error"] == pytest.approx(sum(abs(each["error"]) for each in found) / count)
        inside = sum(each["least"] <= each["measured"] <= each["most"] for each in found)
        assert report[key]["inside_interval"] == pytest.approx(inside / count)
        of = [each[key]["rows"] for each in report["by_source"].values() if each[key]]
        assert sum(of) == count
    assert report["oom"] == {"rows": 4, "right": 4}
    assert {kind: of["rows"] for kind, of in report["memory_counted"].items()} == {"allocated": 12, "formula": 8}
    assert report["by_source"]["Korthikanti22 T5"]["memory"] is None
    assert report["ranking"]["groups"] == report["ranking"]["right"] > 0
    assert len(report["left_out"]) == 6
    assert report["trend"] is None  # one source alone has runs on many and on few GPUs
    assert "On more GPUs" not in out


def test_what_configurations_express_is_told_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "fms_fsdp")]
    code, out, _ = in_process(main, capsys)(*files, "--json", tmp_path / "errors.json")
    assert code == 0
    report = json.loads((tmp_path / "errors.json").read_text())
    found = [row for row in report["rows"] if row["planned"]]
    assert {row["source"] for row in found} == {"fms-fsdp"}
    both = report["planned"]
    assert both["predict"] == report["by_source"]["fms-fsdp"]["time"]
    assert both["formula"]["rows"] == both["predict"]["rows"] == len(found) == 4
    assert both["formula"]["mean_abs_error"] != both["predict"]["mean_abs_error"]
    printed = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    for name, of in (("through predict()", both["predict"]), ("the same, by the formula", both["formula"])):
        assert [name, "4", f"{of['mean_abs_error']:.1%}"] in [line[:3] for line in printed]
    assert report["by_source"]["Korthikanti22 T5"]["planned"] == {"predict": None, "formula": None}


def test_the_trend_with_gpus_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "megascale")]
    code, out, _ = in_process(main, capsys)(*files, "--json", tmp_path / "errors.json")
    assert code == 0
    told = json.loads((tmp_path / "errors.json").read_text())["trend"]
    assert told["sources"] == 2
    assert f"a spread of {told['spread']:.1%} ± {told['error']:.1%} (2 sources" in out


def test_a_source_can_be_predicted_from_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [FOLDER / f"{name}.csv" for name in ("korthikanti22", "simumax_b200")]
    report = tmp_path / "errors.json"
    assert in_process(main, capsys)(*files, "--leave-out", "--json", report)[0] == 0
    fitted_without = json.loads(report.read_text())["time"]["mean_abs_error"]
    assert in_process(main, capsys)(*files, "--json", report)[0] == 0
    assert fitted_without > json.loads(report.read_text())["time"]["mean_abs_error"]


def test_constants_can_be_fitted_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, report = [FOLDER / "korthikanti22.csv"], tmp_path / "errors.json"
    code, out, _ = in_process(main, capsys)(*files, "--fit", "--json", report)
    assert code == 0
    fitted = json.loads(report.read_text())["time"]["mean_abs_error"]
    told = {line.split()[0]: line.split()[1:] for line in out.partition("constant")[2].splitlines() if line.strip()}
    assert float(told["throttle"][0]) == FITTED_CONSTANTS.throttle
    assert any(told[name][0] != told[name][1] for name in BOUNDS)
    assert in_process(main, capsys)(*files, "--json", report)[0] == 0
    assert fitted < json.loads(report.read_text())["time"]["mean_abs_error"]


def test_a_file_without_rows_that_can_be_predicted_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.csv").write_text((FOLDER / "torchtitan.csv").read_text().replace("h100_sxm", "TPU"))
    report = tmp_path / "errors.json"
    code, out, _ = in_process(main, capsys)(tmp_path / "runs.csv", "--json", report, "--worst")
    assert code == 0
    assert "There is no row that can be predicted.\n" in out
    assert "11 rows cannot be predicted, the first: " in out
    told = json.loads(report.read_text())
    assert (told["time"], told["memory"], told["fits"]) == (None, None, {"rows": 0, "right": 0})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["none.csv"], "none.csv: cannot be read"), ([FOLDER / "simumax_b200.csv", "--json", "."], "is a folder")],
)
def test_bad_input_is_one_message(arguments: list[object], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = in_process(main, capsys)(*arguments)
    assert code == 2
    assert told in err


OTHERS = FOLDER.with_name("other_planners.csv")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_tables_in_the_docs_are_what_the_command_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of the command tells errors of step times and memory by source, which have longer names in the docs, and
    the errors of other planners."""
    monkeypatch.setenv("COLUMNS", "200")
    found = tmp_path / "errors.json"
    code, out, _ = in_process(main, capsys)(*sorted(FOLDER.glob("*.csv")), "--peers", OTHERS, "--json", found)
    assert code == 0
    page, report = PAGE.read_text(), json.loads(found.read_text())
    check_other_planners(page, out)
    check_errors(page, report)


def check_other_planners(page: str, out: str) -> None:
    printed = [re.split(r" {2,}", line.strip()) for line in out.partition("\nplanner ")[2].splitlines()]
    table = page.partition("| planner | runs of |")[2].partition("\n\n")[0]
    rows = [cells(line) for line in table.splitlines()[2:]]
    planner = ""
    for first, *others in rows:
        planner = first or planner
        assert [planner, *others] in printed
    assert len(rows) > 10


def check_errors(page: str, report: dict[str, Any]) -> None:
    for key, head in (("time", "| source | rows | fitted: mean |"), ("memory", "| source | counted | rows | mean |")):
        found = [of[key] for of in (*report["by_source"].values(), report) if of[key]]
        told = [cells(line.replace("**", "")) for line in page.partition(head)[2].partition("\n\n")[0].splitlines()[2:]]
        first = 1 if key == "time" else 2
        assert sorted(row[first : first + 4] for row in told) == sorted(
            [
                f"{of['rows']:,}",
                f"{100 * of['mean_abs_error']:.1f} %",
                f"{100 * of['p90']:.1f} %",
                f"{100 * of['inside_interval']:.0f} %",
            ]
            for of in found
        )
    planned = report["planned"]
    for of, name in ((planned["predict"], "through `predict()`"), (planned["formula"], "the same, by the formula")):
        error, p90, inside = (100 * of[key] for key in ("mean_abs_error", "p90", "inside_interval"))
        assert f"| {name} | {of['rows']} | {error:.1f} % | {p90:.1f} % | {inside:.0f} % |" in page


def test_a_row_with_a_word_that_is_not_known_is_refused_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (FOLDER / "torchtitan.csv").read_text().splitlines()
    assert ",zero3," in lines[2]
    lines[2] = lines[2].replace(",zero3,", ",zero1 group 8,")
    (tmp_path / "odd.csv").write_text("\n".join(lines) + "\n")
    code, out, _ = in_process(main, capsys)(tmp_path / "odd.csv")
    assert code == 0
    told = f"1 row cannot be predicted, the first: {tmp_path}/odd.csv:3: sharding = 'zero1 group 8': must be ddp, zero1"
    assert told in out


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("program,version", "program,of", "the first line must be program,version"),
        (",korthikanti22.csv,2,", ",korthikanti22.csv,3,", "is no run of"),
        (",korthikanti22.csv,2,", ",korthikanti22.csv,two,", "of which the last three are numbers"),
        (",1.42,", ",-1.42,", "measured and seconds must be above 0"),
        (",1.42,", f",{'1' * 200_000},", "is not CSV: field larger than field limit"),
    ],
)
def test_predictions_of_other_runs_are_refused(
    old: str, new: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = OTHERS.read_text()
    assert old in text
    (tmp_path / "others.csv").write_text(text.replace(old, new))
    code, _, error = in_process(main, capsys)(FOLDER / "korthikanti22.csv", "--peers", tmp_path / "others.csv")
    assert code == 2
    assert told in error
