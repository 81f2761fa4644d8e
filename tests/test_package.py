"""The wheel: what is in it, and commands that it installs, in an empty folder."""

import re
import subprocess
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from wheel_install import ROOT, at

from megalite import __version__

ROOTS = {"megalite": "megalite", "megalite_kernels": "kernels", "megalite_launch": "launch", "megalite_tools": "tools"}
DATA = ("launch/local.sh", "launch/slurm.sbatch", "launch/thresholds.yaml")


def run(site: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=at(site), capture_output=True, text=True, timeout=60)


def test_no_file_is_forgotten_and_none_is_useless(installed: Path) -> None:
    with zipfile.ZipFile(next(installed.parent.glob("*.whl"))) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {f"{name}/py.typed" for name in (*ROOTS, "megalite_presets")} | {"megalite_presets/__init__.py"}
    wanted |= {f"megalite_presets/{path.relative_to(ROOT / 'configs')}" for path in ROOT.glob("configs/*/*.yaml")}
    wanted |= {f"megalite_{name}" for name in DATA}
    for name, root in ROOTS.items():
        wanted |= {f"{name}/{path.relative_to(ROOT / root)}" for path in (ROOT / root).rglob("*.py")}
    assert found == wanted


def test_its_metadata_are_those_of_the_project(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    about = PathDistribution(folder)
    assert about.version == __version__
    assert "Typing :: Typed" in about.metadata.get_all("Classifier", [])
    assert {entry.name for entry in about.entry_points} == {path.name for path in (installed / "bin").iterdir()}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("megalite show llama3_8b parallel.tp=8", r"name: run"),
        ("megalite plan llama3_8b --gpus 64 batch.global=512 --top 1", r"1  dp 64 zero2"),
        ("megalite list", r"llama3_405b .*405,853,388,800 parameters"),
        ("megalite list slurm.sbatch", r"^#!/usr/bin/env bash\n"),
        ("megalite show small --cluster l40s", r"NVIDIA L40S"),
        ("megalite quickstart --help", r"--steps N"),
    ],
)
def test_commands_work_where_no_checkout_is(command: str, shown: str, installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, *command.split())
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout)
    assert list(tmp_path.iterdir()) == []
