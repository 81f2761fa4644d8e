"""docs/scaling_example.md: its numbers are those that a fit of the runs beside it gives, and its commands exist."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from synthetic_experiments import write

from megalite.commands.fit import fit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scaling_example.md").read_text()
PROSE = " ".join(PAGE.split())


def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / f"docs/benchmarks/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def fitted(name: str, folder: Path, **changes: object) -> dict:
    """The fit as the shipped experiment asks for it. Intervals are left to the page."""
    setup = yaml.safe_load((ROOT / f"configs/experiment/{name}.yaml").read_text())
    write(folder, {**setup, "fit": {**setup.get("fit", {}), "bootstrap": 0, **changes}}, [])
    shutil.copy(ROOT / f"docs/benchmarks/{name}.csv", folder / "results.csv")
    fit(folder)
    return json.loads((folder / "fit.json").read_text())


def plain(value: float, digits: int, sign: str = "") -> str:
    """As the page writes numbers: no zero before the point, and a minus that is one."""
    return f"{value:{sign}.{digits}f}".replace("-", "−").replace("0.", ".", 1 if abs(value) < 1 else 0)


def test_losses_are_those_of_the_runs() -> None:
    for rung in dict.fromkeys(row["rung"] for row in rows("ladder_5x4")):
        losses = [float(row["loss_valid"]) for row in rows("ladder_5x4") if row["rung"] == rung]
        assert losses == sorted(losses, reverse=True)
        line, *_ = re.findall(rf"^\| {rung}\b.*\|$", PAGE, re.MULTILINE)
        assert line.endswith(" | ".join(f"{loss:.3f}" for loss in losses) + " |")


def test_the_law_and_what_it_tells_of_the_held_out_runs(tmp_path: Path) -> None:
    found = fitted("ladder_5x4", tmp_path)
    of = found["fits"]["with_head"]["approach3"]
    law = of["law"]
    terms = f"{law['A']:.2f} / N^{plain(law['alpha'], 3)} + {law['B']:.0f} / D^{plain(law['beta'], 3)}"
    quality = f"R² = {plain(of['r2'], 4)} (of ln(loss)), rms {plain(100 * of['rms'], 2)} %"
    assert f"loss = {law['E']:.3f} + {terms}, {quality}" in PROSE
    assert of["r2"] > 0.995
    assert len(found["holdout"]) == 3
    for row in found["holdout"]:
        assert abs(row["error"]) < 0.015
        numbers = f"{row['measured']:.3f} | {row['predicted'][0]:.3f} | {plain(100 * row['error'], 1, '+')} %"
        assert f"{plain(row['times'], 2)} | {numbers} |" in PAGE


def test_short_runs_bend_the_law(tmp_path: Path) -> None:
    found = fitted("ladder_5x4", tmp_path, min_steps=0)
    errors = [100 * row["error"] for row in found["holdout"]]
    told = f"errors of the four held-out runs are {plain(min(errors), 1)} to {plain(max(errors), 1, '+')} %"
    assert f"R² is {plain(found['fits']['with_head']['approach3']['r2'], 4)}, and {told}" in PROSE


def test_the_gain_of_transfer(tmp_path: Path) -> None:
    (scan,) = fitted("mup_transfer", tmp_path)["rates"]
    cells = {cell["label"].removeprefix("model.parametrization "): cell for cell in scan["cells"]}
    for width in (32, 64, 128):
        shown = [cells[f"{name}, model.width {width}"] for name in ("standard", "mup")]
        numbers = " | ".join(f"{plain(cell['best'], 4)} | {cell['lowest']:.3f}" for cell in shown)
        assert f"| {width} | {numbers} |" in PAGE
    lost = []
    for name in ("standard", "mup"):
        narrow, wide = (cells[f"{name}, model.width {width}"] for width in (32, 128))
        lost.append(100 * math.expm1(wide["curvature"] * math.log(narrow["best"] / wide["best"]) ** 2))
    told = f"loses {lost[0]:.1f} % in the standard parametrization and {plain(lost[1], 1)} % under muP"
    assert told in PROSE
    assert lost[1] < 1  # the goal of transfer over a factor of four in width


@pytest.mark.parametrize(
    "name", re.findall(r"configs/experiment/\w+\.yaml|launch/\w+\.sh|images/\w+\.png|benchmarks/\w+\.csv", PAGE)
)
def test_what_it_names_is_there(name: str) -> None:
    assert (ROOT / name).exists() or (ROOT / "docs" / name).exists()
