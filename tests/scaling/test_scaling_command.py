"""`fit` of an experiment's folder: what is fitted, what is left out and why, and what bad folders are told."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_experiments import SMALL, ladder, sweep, systems, write

from megalite.base.errors import InputError
from megalite.commands.fit import fit
from megalite.scaling.bootstrap import draws, interval
from megalite.scaling.points import choose
from megalite.scaling.settings import DEFINITIONS, Settings, read_settings
from megalite.scaling.table import read_results

QUICK = {"bootstrap": 60}


def fitted(folder: Path) -> dict:
    fit(folder)
    return json.loads((folder / "fit.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def changed(folder: Path, change) -> Path:
    """The folder with rows of its results changed; a row is a dictionary of texts."""
    path = folder / "results.csv"
    header, *lines = [line.split(",") for line in path.read_text().splitlines()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    rows = change(rows) or rows
    path.write_text("\n".join([",".join(header), *(",".join(row[name] for name in header) for row in rows)]))
    return folder


def test_a_ladder_is_fitted_held_out_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = ladder(tmp_path, holdout=["w256"], fit=QUICK, noise=0.001, report=DEFINITIONS)
    found = fitted(folder)
    law = found["fits"]["with_head"]["approach3"]
    assert law["law"]["beta"] == pytest.approx(SMALL.beta, abs=0.05)
    assert law["r2"] > 0.999
    assert law["agreeing"] == law["starts"]
    assert tuple(found["fits"]) == DEFINITIONS
    assert found["data"]["runs"] == 16
    assert len(found["holdout"]) == 4
    for row in found["holdout"]:
        assert abs(row["error"]) < 0.02
        low, high = row["predicted"][1:]
        assert low < row["predicted"][0] < high
        assert row["inside"] == (low <= row["measured"] <= high)
    first, *further = found["predictions"]
    assert [row["times"] for row in further] == [10, 100]
    assert first["loss"][0] > further[0]["loss"][0] > further[1]["loss"][0]
    assert all(row["loss"][1] < row["loss"][0] < row["loss"][2] for row in found["predictions"])
    assert {row["delta"] for row in found["sensitivity"]["delta"]} >= {1e-2, 1e-3, 1e-6}
    assert [row["drop"] for row in found["sensitivity"]["drop"]][:3] == [0, 1, 2]
    assert any("decades" in told for told in found["caveats"])
    assert any("Look at" not in told and "shortest fitted run" in told for told in found["caveats"])
    out = capsys.readouterr().out
    assert "w256-r3" in out
    assert f"{law['law']['E']:.4g}" in out


def test_the_same_results_give_the_same_bytes(tmp_path: Path):
    one, two = ladder(tmp_path / "a", fit=QUICK), ladder(tmp_path / "b", fit=QUICK)
    changed(two, lambda rows: None)
    fitted(one), fitted(two)
    assert (one / "fit.json").read_bytes() == (two / "fit.json").read_bytes()
    assert sorted(path.name for path in one.iterdir()) == ["experiment.yaml", "fit.json", "results.csv"]


@pytest.mark.parametrize("method", ["approach1", "approach2", "kaplan"])
def test_other_methods_predict(method: str, tmp_path: Path):
    shapes = ((64, 2), (80, 2), (96, 3), (128, 4), (160, 4), (192, 5), (256, 6), (320, 7))
    folder = ladder(tmp_path, shapes, noise=0, flops=[3e14, 1e15, 3e15], fit={"method": method, **QUICK})
    found = fitted(folder)
    size = found["predictions"][0]["parameters"][0]
    if method != "kaplan":  # whose law has no floor
        assert size == pytest.approx(SMALL.optimum(3e15)[0], rel=0.5)
        assert found["predictions"][2]["loss"][0] > SMALL.E
    assert found["predictions"][0]["loss_by"] == ("kaplan" if method == "kaplan" else "approach3")


def test_a_method_that_the_runs_do_not_allow_is_refused(tmp_path: Path):
    folder = ladder(tmp_path, fit={"method": "approach2", **QUICK})
    with pytest.raises(InputError, match=r"results.csv: approach2, N = with_head: 0 of .* best size"):
        fit(folder)
    assert not (folder / "fit.json").exists()


def test_runs_are_left_out_by_name_steps_and_loss_and_each_is_named(tmp_path: Path):
    folder = ladder(tmp_path, fit={"min_steps": 600, "drop": 1, **QUICK})
    found = fitted(folder)
    why = {row["slug"]: row["why"] for row in found["data"]["dropped"]}
    few = {name: told for name, told in why.items() if "fewer than fit.min_steps = 600" in told}
    assert "w64-r0" in few
    assert len(why) == len(few) + 1
    assert any("highest losses" in told for told in why.values())
    assert found["data"]["fewest_steps"] >= 600
    drops = {row["drop"] for row in found["sensitivity"]["drop"]}
    assert {0, 1, 2} <= drops

    folder = ladder(tmp_path, fit={"drop": ["w64-r1"], **QUICK})
    assert [row["slug"] for row in fitted(folder)["data"]["dropped"]] == ["w64-r1"]
    folder = ladder(tmp_path, fit={"drop": ["nobody"], **QUICK})
    with pytest.raises(InputError, match=r"fit.drop: nobody: is the id or slug of no finished run"):
        fit(folder)


@pytest.mark.parametrize("value", ["nan", "-1.5", "0", "", "inf"])
def test_a_loss_that_is_none_is_left_out_and_named(value: str, tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)
    changed(folder, lambda rows: rows[3].update(loss_valid=value, loss_train=value or "1.0"))
    found = fitted(folder)
    if value == "":  # one run without a validation loss: all training losses are fitted
        assert found["data"]["loss"] == "loss_train"
        assert any("so the training loss of all is fitted" in told for told in found["caveats"])
        return
    assert found["data"]["loss"] == "loss_valid"
    (row,) = found["data"]["dropped"]
    assert row["slug"] == "w64-r3"
    assert "which is no loss" in row["why"]


def test_seeds_tell_the_noise_and_the_best_setting_counts(tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)

    def change(rows):
        again = [
            {**row, "id": row["id"][::-1], "seed": "1", "loss_valid": str(float(row["loss_valid"]) * 1.01)}
            for row in rows
        ]
        return rows + again

    found = fitted(changed(folder, change))
    assert found["data"]["runs"] == 40
    assert found["data"]["seed_noise"] == pytest.approx(math.log(1.01) / math.sqrt(2), rel=1e-6)

    text = (folder / "results.csv").read_text().splitlines()
    (folder / "results.csv").write_text(
        "\n".join(
            [
                text[0] + ",optim.lr",
                *(f"{line},{0.1 if '0:' in line else at % 40 // 20}" for at, line in enumerate(text[1:])),
            ]
        )
    )
    found = fitted(folder)
    assert found["data"]["runs"] == 20
    assert any("20 cells of 20 had several settings" in told for told in found["caveats"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"experiment": {"kind": "stairs"}}, 'experiment.kind = "stairs": must be sweep, ladder or systems'),
        ({"fit": {"method": "approach9"}}, 'fit.method = "approach9": must be approach3, approach1'),
        ({"fit": {"delta": 0}}, "fit.delta = 0.0: must be above 0"),
        ({"fit": {"delta": True}}, "fit.delta = true: must be a finite number"),
        ({"fit": {"detla": 1}}, r"fit.detla: unknown key; did you mean fit.delta\?"),
        ({"fit": {"colour": 1}}, "fit.colour: unknown key; fit has method, delta, min_steps, drop and bootstrap"),
        ({"fit": {"drop": -1}}, "fit.drop = -1"),
        ({"fit": {"drop": [3]}}, r"fit.drop\[0\] = 3: must be text"),
        ({"fit": {"bootstrap": 10**9}}, "fit.bootstrap = 1000000000: must be from 0 to 10,000"),
        ({"fit": {"min_steps": 1.5}}, "fit.min_steps = 1.5"),
        ({"fit": [1]}, r"fit = \[1\]: must be a section"),
        ({"holdout": {"rungs": ["w9"]}}, "holdout.rungs = 'w9': is no rung of this experiment; its rungs are w128"),
        ({"holdout": {"runs": []}}, r"holdout.runs: unknown key; did you mean holdout.rungs\?"),
        ({"parameters": {"fit": "all"}}, 'parameters.fit = "all": must be total, with_head or non_embedding'),
        ({"parameters": {"report": ["total"] * 2}}, "parameters.report .*: names one twice"),
    ],
)
def test_bad_settings_are_refused(settings: dict, told: str, tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)
    given = json.loads((folder / "experiment.yaml").read_text()) | settings
    (folder / "experiment.yaml").write_text(json.dumps(given))
    with pytest.raises(InputError, match=told):
        fit(folder)
    assert not (folder / "fit.json").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no column id"),
        ("id,slug,status\nabc,x,done,4\n", "line 2: has 4 cells where 3 are named"),
        ("id,slug,status\nabc,x,finished\n", "line 2: status = 'finished': must be planned"),
        ("id,slug,status\nabc,x,done\nabc,y,done\n", "line 3: id = abc: stands in line 2 too"),
        ("id,slug,status\n,x,done\n", "line 2: id is empty"),
        ("id,slug,status,tokens\nabc,x,done,many\n", "line 2: tokens = 'many': must be a number, or empty"),
        ("id,slug,status,tokens\nabc,x,done,1_000\n", "line 2: tokens = '1_000': must be a number, or empty"),
        ("id,slug,status,tokens\nabc,x,done,１２\n", "line 2: tokens = '１２': must be a number, or empty"),
        ("id,slug,status,tokens,loss_valid\nabc,x,done,1e-300,2\n", "left out: tokens is 1e-300"),
        ("id,slug,slug,status\n", "each once"),
        ('id,slug,status\n"abc,x,done\n', "is no CSV"),
        ("id,slug,status\na,x,oom\nb,y,failed\n", "no finished run is left to fit; the runs are: 1 failed and 1 oom"),
        ("id,slug,status\0\n", "has no column status"),
    ],
)
def test_bad_results_are_refused(text: str, told: str, tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)
    (folder / "results.csv").write_text(text)
    with pytest.raises(InputError, match=told):
        fit(folder)


def test_a_missing_file_and_a_systems_experiment_are_told(tmp_path: Path):
    with pytest.raises(InputError, match=r"results.csv: is missing"):
        fit(write_only_settings(tmp_path / "a"))
    with pytest.raises(InputError, match="kind = systems: has no law to fit"):
        fit(systems(tmp_path / "b"))
    with pytest.raises(InputError, match=r"experiment.yaml: cannot be read"):
        fit(tmp_path / "none")
    folder = ladder(tmp_path / "c", fit=QUICK)
    (folder / "fit.json").symlink_to("elsewhere")
    with pytest.raises(InputError, match="is a link"):
        fit(folder)


def write_only_settings(folder: Path) -> Path:
    write(folder, {"experiment": {"kind": "ladder"}}, [{"id": "a", "slug": "a", "status": "done"}])
    (folder / "results.csv").unlink()
    return folder


def test_few_runs_have_no_intervals_and_say_so(tmp_path: Path):
    folder = ladder(tmp_path, ((64, 2), (96, 3), (128, 4)), (5, 10, 20), fit=QUICK)
    changed(folder, lambda rows: rows[:8])
    found = fitted(folder)
    assert found["samples"] == {}
    assert found["predictions"][0]["loss"][1:] == [None, None]
    assert any("There are no intervals" in told for told in found["caveats"])


def test_an_outlier_is_named(tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK, noise=0.001)
    changed(folder, lambda rows: rows[7].update(loss_valid=str(float(rows[7]["loss_valid"]) * 1.06)))
    assert any(told.startswith("w96-r3-") and "far from the law" in told for told in fitted(folder)["caveats"])


def test_rates_and_batches_are_found_and_edges_are_named(tmp_path: Path):
    folder = sweep(tmp_path)
    changed(
        folder,
        lambda rows: [
            row
            for row in rows
            if row["slug"].startswith("w") and not (row["slug"].startswith("w64-b16") and float(row["optim.lr"]) < 3e-3)
        ],
    )
    found = fitted(folder)
    rate, batch = found["rates"]
    assert rate["key"] == "optim.lr"
    cells = {cell["label"]: cell for cell in rate["cells"]}
    for width, size in ((128, 16), (256, 64)):
        best = cells[f"model.width {width}, batch.global {size}"]["best"]
        assert best == pytest.approx(0.004 * 64 / width * (size / 32) ** 0.5, rel=1e-6)
    assert cells["model.width 64, batch.global 16"]["best"] is None
    assert "smallest value with a loss has the lowest one" in cells["model.width 64, batch.global 16"]["why"]
    (law,) = rate["laws"]
    assert (law["cells"], law["setting"]) == (8, {})
    assert law["exponents"]["batch"][0] == pytest.approx(0.5, abs=0.01)
    assert law["exponents"]["N"][0] < -0.5
    of_batch = {cell["label"]: cell for cell in batch["cells"]}
    assert of_batch["model.width 256"]["best"] == pytest.approx(32, rel=1e-6)
    assert "2 values with a loss" in of_batch["model.width 64"]["why"]


def test_each_parametrization_has_a_law_of_its_own(tmp_path: Path):
    found = fitted(sweep(tmp_path, batches=[16, 32, 64], parametrizations=["standard", "mup"]))
    rate, batch = found["rates"]
    assert rate["cells"][0]["label"] == "model.parametrization standard, model.width 64, batch.global 16"  # no heads
    standard, mup = rate["laws"]
    assert (standard["setting"], standard["cells"]) == ({"model.parametrization": "standard"}, 9)
    assert standard["exponents"]["N"][0] < -0.5
    assert mup["family"] == "model.parametrization mup"
    assert mup["exponents"]["N"][0] == pytest.approx(0, abs=1e-6)
    assert [law["cells"] for law in batch["laws"]] == [3, 3]


def test_a_sweep_without_rates_is_refused(tmp_path: Path):
    folder = sweep(tmp_path, rates=[1e-3], batches=[32])
    with pytest.raises(InputError, match="no learning rate and no batch was varied"):
        fit(folder)


def test_draws_have_enough_different_runs_and_intervals_are_stretched():
    drawn = draws(9, 300, 6)
    assert (drawn.sum(axis=1) == 9).all()
    assert (drawn > 0).sum(axis=1).min() == 6
    assert (draws(9, 300, 6) == drawn).all()
    values = np.linspace(0, 1, 101)
    found = interval(0.5, np.append(values, np.nan), 9)
    assert (found.high - found.low) == pytest.approx(0.9 * math.sqrt(9 / 8))
    assert found.draws == 101
    logs = interval(1.0, np.exp(values), 9, True)
    assert math.log(logs.high / logs.low) == pytest.approx(0.9 * math.sqrt(9 / 8))


def test_settings_and_rungs_are_read(tmp_path: Path):
    folder = ladder(tmp_path, holdout=["w256"], fit={"delta": 1e-2})
    settings = read_settings(folder)
    assert (settings.delta, settings.holdout, settings.kind) == (1e-2, ("w256",), "ladder")
    chosen = choose(read_results(folder / "results.csv"), Settings(kind="ladder", holdout=("w64", "w96")))
    assert {run.rung for run in chosen.held_out.runs} == {"w64", "w96"}
    assert {run.rung for run in chosen.fitted.runs} == {"w128", "w192", "w256"}


def test_the_lowest_loss_at_an_end_is_no_optimum_though_a_parabola_has_one(tmp_path: Path):
    folder = sweep(tmp_path, rates=[1e-3, 2e-3, 4e-3], batches=[32], widths=[64, 128])
    changed(
        folder,
        lambda rows: [
            {**row, "loss_valid": loss}
            for row, loss in zip(rows, ["3.0", "2.0", "1.99", "3.0", "2.0", "2.5"], strict=True)
        ],
    )
    edge, inner = fitted(folder)["rates"][0]["cells"]
    assert edge["why"] == "the largest value with a loss has the lowest one"
    assert inner["best"] == pytest.approx(2e-3, rel=0.2)


def test_runs_of_other_lengths_are_other_cells(tmp_path: Path):
    """As in successive halving: longer runs of some rates have lower losses, whatever their rates."""
    folder = sweep(tmp_path, rates=[1e-3, 2e-3, 4e-3, 8e-3, 16e-3], batches=[32], widths=[64])

    def change(rows):
        longer = [
            {**row, "id": row["id"][::-1], "tokens": "40000000", "loss_valid": str(float(row["loss_valid"]) - 0.3)}
            for row in rows[3:]
        ]
        return rows + longer

    short, long = fitted(changed(folder, change))["rates"][0]["cells"]
    assert short["best"] == pytest.approx(4e-3, rel=1e-6)
    assert "2 values with a loss" in long["why"]
    assert short["label"] == "tokens 1e+07"


def test_losses_that_follow_no_law_are_told(tmp_path: Path):
    folder = ladder(tmp_path, fit=QUICK)
    changed(folder, lambda rows: [{**row, "loss_valid": str(2 + 0.3 * (at * 7 % 5))} for at, row in enumerate(rows)])
    told = "\n".join(fitted(folder)["caveats"])
    assert "of the variance of the losses (R²)" in told
    assert "these runs do not tell it" in told
