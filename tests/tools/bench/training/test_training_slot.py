"""The scripts that run a plan on a machine that is lent for half an hour."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SLOT = ROOT / "tools" / "bench" / "slot"
TELL = """
import os, tempfile
names = "HOME TMPDIR XDG_CACHE_HOME TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR CUDA_CACHE_PATH PYTHONPYCACHEPREFIX"
names += " HF_HOME MPLCONFIGDIR HYPOTHESIS_STORAGE_DIRECTORY"
print("\\n".join([tempfile.gettempdir(), *(os.environ[name] for name in names.split())]))
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SLOT / "run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("4",), ("--part",)])
def test_the_part_must_be_told(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert "it must be a part of the plan: 1, 2, 3 or all" in ended.stderr


def test_a_part_runs_its_cases_and_writes_where_it_may(tmp_path: Path) -> None:
    plan, out, slot = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "slot"
    cases = [{"id": name, "part": part, "command": ["python", "-c", TELL]} for part, name in enumerate("abc", 1)]
    plan.write_text(json.dumps({"cases": cases}))
    more = ("--plan", str(plan), "--device", "cpu", "--tiny")
    ended = run("2", *more, OUT=str(out), SLOT=str(slot))
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads((out / "rows.json").read_text())["rows"]
    assert (row["id"], row["status"]) == ("b", "ok")
    assert all(path.startswith(str(slot)) for path in row["tail"].split()), row["tail"]
    assert len(row["tail"].split()) == 11
    assert run("all", *more, OUT=str(out), SLOT=str(slot)).returncode == 0
    assert {row["id"] for row in json.loads((out / "rows.json").read_text())["rows"]} == {"a", "b", "c"}


def test_no_time_is_told_and_ends_with_its_own_code(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps({"cases": [{"id": "a", "limit": 60, "command": ["python", "-c", ""]}]}))
    more = ("--plan", str(plan), "--device", "cpu", "--tiny")
    ended = run("all", *more, SLOT=str(tmp_path / "slot"), SLOT_SECONDS="30")
    assert ended.returncode == 3
    assert "no time was left for a; the same command goes on there" in ended.stderr
    assert "## Not run\n\na\n" in ended.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_pass_shellcheck() -> None:
    scripts = [str(path) for path in sorted(SLOT.glob("*.sh"))]
    assert len(scripts) == 2
    ended = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout


def test_where_megalite_is_not_installed_the_packed_wheel_is(installed: Path, tmp_path: Path) -> None:
    """If it is that of the checkout, which holds more than programs."""
    bare, slot, plan = tmp_path / "bare", tmp_path / "slot", tmp_path / "plan.yaml"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=60)
    (packages,) = bare.glob("lib/python*/site-packages")
    for path in Path(pytest.__file__).parents[1].iterdir():
        if "megalite" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    (slot / "wheels").mkdir(parents=True)
    for wheel in installed.parent.glob("*.whl"):
        shutil.copy(wheel, slot / "wheels")
    (slot / "COMMIT").write_text("0123456789ab\n")
    # Found, not imported: PyTorch would be compiled anew, as the slot has a cache of its own.
    code = "from importlib.util import find_spec; print(find_spec('megalite_kernels').origin)"
    plan.write_text(json.dumps({"cases": [{"id": "a", "command": ["python", "-c", code]}]}))
    more = ("all", "--plan", str(plan), "--device", "cpu", "--tiny")
    places = {"PYTHON": str(bare / "bin" / "python"), "SLOT": str(slot), "OUT": str(tmp_path / "out"), "PYTHONPATH": ""}
    ended = run(*more, **places)
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads((tmp_path / "out" / "rows.json").read_text())["rows"]
    assert row["tail"].strip() == str(slot / "site" / "megalite_kernels" / "__init__.py")
    (slot / "site" / "megalite" / "__init__.py").write_text("")
    ended = run(*more, **places)
    assert ended.returncode == 2
    assert ".slot/wheels has another megalite than this checkout; run tools/bench/slot/pack.sh again" in ended.stderr
