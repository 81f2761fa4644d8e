"""The published runs, read and timed once for all tests of this folder."""

from pathlib import Path

import pytest

from megalite_tools.plan.published.rows import Row, read_rows
from megalite_tools.plan.published.score import Compared, timed


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    files = sorted(Path(__file__).with_name("runs").glob("*.csv"))
    return [row for file in files for row in read_rows(file)[0]]


@pytest.fixture(scope="session")
def times(rows: list[Row]) -> list[Compared]:
    return timed(rows)
