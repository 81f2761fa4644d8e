"""The exit codes in megalite's code are those that its pages, its help and its launch scripts speak of."""

import re
from pathlib import Path

import pytest

from megalite.base.exit_codes import ExitCode, table
from megalite.commands import main

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\b\d+\b")


def test_the_page_has_one_row_for_each() -> None:
    page = (ROOT / "docs/exit_codes.md").read_text()
    rows = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert rows == sorted(ExitCode)


def test_no_other_page_has_a_table_of_them() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    row = re.compile(r"^\| `?(\d+)`? \|", re.MULTILINE)
    tables = {path.name for path in pages if set(ExitCode) <= set(map(int, row.findall(path.read_text())))}
    assert tables == {"exit_codes.md"}


def test_the_help_of_megalite_tells_all() -> None:
    assert list(main.CODES) == sorted(ExitCode)
    assert table(main.CODES) in main.EPILOG


def test_a_table_is_aligned() -> None:
    assert table({ExitCode.DONE: "well", ExitCode.INTERRUPTED: "by the keyboard,\nor so"}) == (
        "exit codes:\n  0    well\n  130  by the keyboard,\n       or so\n"
    )


@pytest.fixture(scope="module")
def final() -> list[str]:
    """The codes after which launch/slurm.sbatch may give up: the branches of its `case`."""
    script = (ROOT / "launch/slurm.sbatch").read_text()
    (branches,) = re.findall(r"case \$code in\n(.*?)\nesac", script, re.DOTALL)
    return re.findall(r"^ *([\d| ]+)\) ", branches, re.MULTILINE)


def test_the_slurm_script_goes_by_them(final: list[str]) -> None:
    untrained, always, of_a_rank = ({int(code) for code in NUMBER.findall(codes)} for codes in final)
    assert untrained == {ExitCode.BAD_INPUT}
    assert always == {ExitCode.UNHEALTHY, ExitCode.INTERRUPTED}
    assert of_a_rank == {ExitCode.FAILED}


def test_the_page_of_launching_tells_after_which_the_slurm_script_requeues() -> None:
    told = (ROOT / "docs/launch.md").read_text()
    codes = f"{ExitCode.STOPPED}, {ExitCode.LOST_CONTACT} and codes above 128 but {ExitCode.INTERRUPTED}"
    assert f"requeues after {codes}" in told
