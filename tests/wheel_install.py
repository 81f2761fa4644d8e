"""Builds the wheel from a copy of the checkout, and installs it into a folder; without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("configs", "kernels", "launch", "megalite", "tools", "LICENSE", "README.md", "pyproject.toml", "setup.py")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
PIP = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")


def install(folder: Path) -> Path:
    """The folder with the installed packages and, in `bin`, programs. The wheel itself is left in `folder`."""
    copy, site = folder / "copy", folder / "site"
    copy.mkdir()
    for part in PARTS:  # in a copy, since a build leaves files, of which the next one would find those gone meanwhile
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy)
    _python(copy, "-c", BUILD, str(folder))
    (wheel,) = folder.glob("*.whl")
    _python(folder, *PIP, "--target", str(site), str(wheel))
    return site


def at(site: Path) -> dict[str, str]:
    """The environment in which a shell finds the programs of an installation, and these its packages."""
    return {**os.environ, "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(site)}


def _python(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
