"""The folder of an experiment: nothing that people wrote is replaced, and nothing that is known is lost."""

import csv
import stat
from pathlib import Path

import pytest
from faked import Faked

GRID = {"optim.lr": [0.01, 0.02]}
EXP = Path("experiments/exp")


def only_run(folder: Path, slug: str) -> Path:
    return next((folder / EXP / "runs").glob(f"{slug}-*"))


@pytest.mark.parametrize("blocked", ["logs/sweep.log/", "logs", "sweep"])
def test_a_run_whose_folder_cannot_be_used_waits_and_others_go_on(blocked: str, tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid=GRID)
    faked.sweep("launch", "--dry-run")
    faked.sweep("expand")
    with (tmp_path / EXP / "index.csv").open() as file:
        run = tmp_path / EXP / "runs" / next(csv.DictReader(file))["name"]
    (run / blocked).parent.mkdir(parents=True)
    (run / blocked).mkdir() if blocked.endswith("/") else (run / blocked).touch()
    told = faked.sweep("launch", code=1)
    assert faked.states() == {"lr0.01": "planned", "lr0.02": "done"}
    assert f"planned   {run.name}: its folder cannot be used: " in told.stderr
    assert blocked.rstrip("/") in faked.statuses()["lr0.01"]["reason"]
    (run / blocked).rmdir() if blocked.endswith("/") else (run / blocked).unlink()
    faked.sweep("launch")
    assert set(faked.states().values()) == {"done"}


def test_status_shows_how_runs_stand_where_it_cannot_write(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid=GRID)
    faked.sweep("launch")
    (tmp_path / EXP / "index.csv").unlink()
    (tmp_path / EXP / "index.csv").mkdir()
    told = faked.sweep("status", code=2)
    assert "2 runs: 2 done" in told.stdout
    assert "index.csv: is a folder" in told.stderr


def test_a_log_of_runners_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid=GRID)
    (tmp_path / EXP).mkdir(parents=True)
    (tmp_path / EXP / "launches").touch()
    assert "launches/local.log: cannot be written to: File exists" in faked.sweep("launch", code=2).stderr


def test_files_of_people_are_not_replaced(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid=GRID)
    own = tmp_path / EXP / "experiment.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((tmp_path / "exp.yaml").read_text().replace("base.yaml", "../../base.yaml"))
    before = own.read_text()
    for way in ("expand", "launch", "collect"):
        assert "experiment.yaml: was not written by megalite-sweep" in faked.sweep(way, code=2).stderr
    (own.parent / "base.yaml").write_text("model: {}\n")
    assert "base.yaml: was not written by megalite-sweep" in faked.sweep("expand", code=2).stderr
    assert (own.read_text(), (own.parent / "base.yaml").read_text()) == (before, "model: {}\n")


def test_configurations_are_for_their_owner(tmp_path: Path) -> None:
    Faked(tmp_path, {}, grid=GRID).sweep("launch", code=0)
    names = ("base.yaml", "experiment.yaml", "run.yaml")
    found = [path for path in (tmp_path / EXP).rglob("*.yaml") if path.name in names]
    assert (len(found), {stat.S_IMODE(path.stat().st_mode) for path in found}) == (4, {0o600})


def test_an_experiment_of_another_kind_does_not_move_in(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid=GRID)
    faked.sweep("launch")
    faked.write(experiment={"kind": "systems"}, gpus=[1])
    assert "is of an experiment of the kind sweep, not systems" in faked.sweep("collect", code=2).stderr
    faked.write(grid={"optim.lr": [0.01]})  # but it may grow and shrink
    assert "1 run in the folder is no longer part" in faked.sweep("status").stdout


def test_results_outlive_the_folders_of_runs(tmp_path: Path) -> None:
    rungs = {name: {"model": {"width": width}} for name, width in (("a", 16), ("b", 32), ("c", 64))}
    sections = {"rungs": rungs, "tokens": [320, 640, 1280], "trunk": {"decay": 0.2}, "fit": {"bootstrap": 0}}
    faked = Faked(tmp_path, {}, experiment={"kind": "ladder"}, **sections)
    faked.sweep("launch")
    faked.sweep("collect")
    results = tmp_path / EXP / "results.csv"
    before = results.read_text()
    (tmp_path / EXP / "runs").rename(tmp_path / "elsewhere")
    assert "has finished runs that would be lost" in faked.sweep("collect", code=2).stderr
    assert "is read as it is" in faked.sweep("fit").stdout
    assert results.read_text() == before
