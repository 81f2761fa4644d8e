"""docs/layouts.md has what `megalite plan` answers. `make layouts` makes its rows again."""

from pathlib import Path

import pytest
from layout_tables import Row, answered, rows_of

PAGE = Path("docs/layouts.md").read_text(encoding="utf-8")
ROWS = list(rows_of(PAGE))
QUICK = [row for row in ROWS if row.gpus <= 8 or (row.model == "8B" and row.gpus <= 64)]  # the others take seconds each


def test_all_tables_are_found() -> None:
    assert {(row.length, row.named) for row in ROWS} == {(8192, False), (8192, True), (131072, False)}
    assert len(ROWS) > 50


@pytest.mark.parametrize("row", QUICK, ids=str)
@pytest.mark.usefixtures("older_fsdp")
def test_a_row_is_what_the_planner_answers(row: Row) -> None:
    assert PAGE.splitlines()[row.line] == answered(row)
