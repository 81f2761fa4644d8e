"""Every command of docs/scaling.md, one after another, on experiments with known truths in place of training."""

import csv
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from synthetic_experiments import ladder, sweep

from megalite.commands.fit import fit
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite_tools.experiment import fit_law, predict
from megalite_tools.experiment import sweep as sweep_command

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "megalite-sweep": sweep_command.main,
    "megalite-fit-law": fit_law.main,
    "megalite-predict": predict.main,
}
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]
QUICK = {"bootstrap": 20}


def of(program: str) -> list[list[str]]:
    found = [arguments for name, *arguments in COMMANDS if name == program]
    assert found
    return found


def run(program: str, arguments: Sequence[str]) -> None:
    assert PROGRAMS[program](list(arguments)) == 0


def test_there_are_no_others() -> None:
    assert {name for name, *_ in COMMANDS} == set(PROGRAMS)
    assert {way for way, *_ in of("megalite-sweep")} == set(sweep_command.WAYS)


def test_commands_of_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is shown only; results that were brought from elsewhere stand for those of its runs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "experiments" / "ladder"
    for way, *arguments in of("megalite-sweep"):
        if way == "fit":
            ladder(tmp_path / "trained", ((64, 2), (128, 4), (256, 6)), (5, 10, 20))
            (tmp_path / "trained" / "results.csv").replace(folder / "results.csv")
        run("megalite-sweep", [way, *arguments, *["--dry-run"] * (way == "launch")])
    assert (folder / "fit.json").exists()
    assert (folder / "report" / "index.html").exists()


def test_commands_of_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (
        ladder(tmp_path / "experiments/small", fit=QUICK, folders=True),
        sweep(tmp_path / "experiments/lr-batch"),
    ):
        fit(folder)
    for arguments in of("megalite-predict"):
        run("megalite-predict", arguments)
    assert check(load(["large.yaml"], []), 256)


def test_commands_for_runs_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (ladder(tmp_path / "small") / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = [(row["n_total"], 6 * float(row["n_total"]) * float(row["tokens"]), row["loss_valid"]) for row in rows]
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("params", "flops", "valid_loss"), *table])
    for arguments in of("megalite-fit-law"):
        run("megalite-fit-law", arguments)
    assert (tmp_path / "law.json").exists()
