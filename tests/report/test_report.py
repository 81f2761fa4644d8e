"""The page of an experiment: every picture that there are numbers for, and nothing from a network."""

import csv
import json
import re
from pathlib import Path

import pytest
from page_cases import Page
from synthetic_experiments import ladder, row, sweep, systems, write

from megalite.base.errors import InputError
from megalite.commands.experiment_report import report
from megalite.commands.fit import fit
from megalite.report.axes import steps
from megalite.report.picture import colours, in_legend
from megalite.report.systems import _medians

SHAPES = ((64, 2), (80, 2), (96, 3), (128, 4), (160, 4), (192, 5), (256, 6))
QUICK = {"bootstrap": 40}


def read(folder: Path) -> tuple[Page, str]:
    report(folder)
    text = (folder / "report" / "index.html").read_text()
    return Page(text), text


def names(folder: Path) -> set[str]:
    """Of the pictures, each as PNG and CSV."""
    found = {path.stem for path in (folder / "report").glob("*.png")}
    assert found == {path.stem for path in (folder / "report").glob("*.csv")}
    for name in found:
        assert (folder / "report" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        lines = list(csv.reader((folder / "report" / f"{name}.csv").open()))
        assert len(lines) > 1
        assert len(set(map(len, lines))) == 1
    return found


def check(page: Page, text: str) -> None:
    """Nothing is loaded, names are there once, and colours are those of the page."""
    rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http:" not in rest
    assert "https:" not in rest
    assert "@import" not in rest
    assert re.findall(r"url\((?!#)", rest) == []
    assert [name for name in page.loaded if name != "href"] == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if tag == "use":
            assert attributes["href"][1:] in ids
    assert "#1f2933" not in text.split("</style>")[-1]
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["aria-label"]


@pytest.fixture(scope="module")
def isoflop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ladder(
        tmp_path_factory.mktemp("isoflop"),
        SHAPES,
        flops=[3e14, 1e15, 3e15],
        holdout=["w256"],
        folders=True,
        tasks=True,
        fit=QUICK,
    )
    fit(folder)
    return folder


def test_a_ladder_has_every_picture(isoflop: Path):
    page, text = read(isoflop)
    check(page, text)
    assert names(isoflop) == {
        "accuracy",
        "bootstrap",
        "curves",
        "envelope",
        "holdout",
        "isoflop",
        "loss_by_size",
        "loss_by_tokens",
        "optimum",
        "residuals",
    }
    for words in ("Mind", "Held-out runs", "Predictions", "decades", "Configuration", "w256-c0", "Loss by size"):
        assert words in page.text
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 10


def test_numbers_of_a_picture_are_those_of_the_results(isoflop: Path):
    read(isoflop)
    by_run = {line["slug"]: line for line in csv.DictReader((isoflop / "results.csv").open())}
    drawn = list(csv.DictReader((isoflop / "report" / "loss_by_size.csv").open()))
    assert len(drawn) == 18
    for line in drawn:
        assert float(line["loss"]) == float(by_run[line["run"]]["loss_valid"])
        assert float(line["N"]) == float(by_run[line["run"]]["n_with_head"])


def test_without_a_fit_runs_are_shown_and_the_page_says_so(tmp_path: Path):
    folder = ladder(tmp_path, SHAPES[:3])
    page, text = read(folder)
    check(page, text)
    assert names(folder) == {"loss_by_size", "loss_by_tokens", "envelope"}
    assert "There is no fit.json" in page.text


def test_a_sweep_shows_bowls(tmp_path: Path):
    folder = sweep(tmp_path)
    fit(folder)
    page, text = read(folder)
    check(page, text)
    assert names(folder) == {"bowls_rate", "best_rate", "bowls_batch", "best_batch"}
    assert "2 diverged" in page.text


def test_speeds_of_nothing_are_no_speeds(tmp_path: Path):
    folder = systems(tmp_path)
    text = (folder / "results.csv").read_text()
    header = text.splitlines()[0].split(",")
    at = header.index("tokens_per_second_per_gpu")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    lines = [",".join([*row[:at], "0", *row[at + 1 :]]) for row in rows]
    (folder / "results.csv").write_text("\n".join([",".join(header), *lines]))
    read(folder)
    assert names(folder) == {"mfu", "memory"}


def test_a_systems_experiment_shows_scaling_and_what_ran_out_of_memory(tmp_path: Path):
    folder = systems(tmp_path)
    page, text = read(folder)
    check(page, text)
    assert names(folder) == {"throughput", "efficiency", "mfu", "memory"}
    assert "OOM" in page.text
    assert "no fit.json" not in page.text
    first = next(csv.DictReader((folder / "report" / "efficiency.csv").open()))
    assert float(first["efficiency"]) == 1


def test_lines_go_through_the_median_of_repeats():
    assert _medians([8, 2, 2, 8, 2], [5.0, 1.0, 4.0, 7.0, 2.0]) == ([2, 8], [2.0, 6.0])


def test_an_old_fit_is_told_and_a_broken_one_refused(tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)
    fit(folder)
    lines = (folder / "results.csv").read_text().splitlines()
    (folder / "results.csv").write_text("\n".join(lines[:-2]))
    page, _ = read(folder)
    assert "fit.json is not of these results: 0 finished runs are not in it, and 2 of its runs" in page.text
    good = json.loads((folder / "fit.json").read_text())
    for change, told in (
        ({"version": 99}, "version = 99: is not what this program writes"),
        ({"kind": "sweep"}, "was fitted with kind = sweep"),
        ({"fits": 3}, "is not what megalite-sweep fit writes"),
        ({"holdout_method": "approach7"}, "is not what megalite-sweep fit writes"),
        ({"data": []}, "is not what megalite-sweep fit writes"),
    ):
        (folder / "fit.json").write_text(json.dumps(good | change))
        with pytest.raises(InputError, match=told):
            report(folder)


def test_names_of_users_are_text(tmp_path: Path):
    evil = '<script>alert("x")</script>$a_b$ gs://me:precious@host'
    rows = [
        row(
            evil,
            "ladder",
            {evil: f"{evil}{at}"},
            rung=evil,
            n_total=10.0**at,
            n_with_head=10.0**at,
            tokens=1e9 * at,
            n_non_embedding=10.0**at,
            loss_valid=3.0 - 0.1 * at,
            steps=10,
            id=f"{at:010}",
        )
        for at in range(4, 9)
    ]
    folder = write(tmp_path, {"experiment": {"kind": "ladder", "name": evil}}, rows)
    path = folder / "runs" / "x"
    path.mkdir(parents=True)
    page, text = read(folder)
    check(page, text)
    assert "<script" not in text
    assert 'alert("x")' in page.text
    assert "precious" not in page.text.partition("Configuration")[2]


def test_metrics_that_cannot_be_read_are_told(tmp_path: Path):
    folder = ladder(tmp_path, SHAPES[:3], folders=True)
    broken, empty = sorted((folder / "runs").iterdir())[:2]
    (broken / "metrics.jsonl").write_text("{no json\n{}\n")
    (empty / "metrics.jsonl").write_text("")
    page, _ = read(folder)
    assert "is not a record of a run" in page.text
    assert "Training losses of 10 runs" in page.text


def test_a_file_in_the_way_is_told_and_nothing_is_written(tmp_path: Path):
    folder = systems(tmp_path)
    (folder / "report").mkdir()
    (folder / "report" / "index.html").mkdir()
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        report(folder)
    assert [path.name for path in (folder / "report").iterdir()] == ["index.html"]


def test_an_experiment_without_runs_is_refused(tmp_path: Path):
    folder = systems(tmp_path)
    (folder / "results.csv").write_text("id,slug,status\n")
    with pytest.raises(InputError, match="has no runs"):
        report(folder)


@pytest.mark.parametrize("ends", [(1, 1e9), (0.9, 1.1), (1.61, 1.99), (3e5, 2e6), (1e17, 2.5e22), (2.0, 9.5)])
def test_axes_have_some_marks_and_not_many(ends: tuple[float, float]):
    marks = steps(*ends)
    assert 2 <= len(marks) <= 9
    assert all(ends[0] * 0.999 <= mark <= ends[1] * 1.001 for mark in marks)


def test_legends_name_the_first_and_the_last():
    assert in_legend(3) == {0, 1, 2}
    assert {0, 99} <= in_legend(100)
    assert len(in_legend(100)) == 10
    assert len(set(colours(20))) == 20
