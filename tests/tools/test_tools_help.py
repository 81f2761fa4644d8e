"""What `--help` says: of every program, and narrow enough for a terminal."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from megalite.commands.main import main

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
TOOLS = {name.partition("-")[2]: entry.partition(":") for name, entry in SCRIPTS.items() if name != "megalite"}


@pytest.mark.parametrize("tool", ["", *TOOLS])
def test_help_fits_80_columns_and_explains_every_option(
    tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        (getattr(import_module(TOOLS[tool][0]), TOOLS[tool][2]) if tool else main)()
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    options = re.findall(r"^  (--?\S.*)\n(.*)", told.partition("options:")[2], re.MULTILINE)
    assert [option for option, after in options if "  " not in option and not after.startswith("   ")] == []
