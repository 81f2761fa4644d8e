"""Makes the rows of docs/layouts.md again: `python tests/layout_search/layout_tables.py docs/layouts.md`.

`make layouts` runs this too.

A row is what `megalite plan` answers to the command above its table.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megalite.commands.plan.no_layout import nearest
from megalite.commands.plan.request import ask
from megalite.commands.plan.tables import layout_text
from megalite.plan.memory.fit import GIB
from megalite_launch.base.texts import seconds_text

MODELS = {"1B": "llama3.2_1b", "8B": "llama3_8b", "70B": "llama3_70b", "405B": "llama3_405b"}
TABLES = {  # in the page's order: sequences of a step, their length, and the cluster where a row names none
    "## What the planner answers": (2048, 8192, "h100_sxm"),
    "512 sequences of 8,192 tokens on other GPUs:": (512, 8192, None),
    "128 sequences of 131,072 tokens on H100 SXM:": (128, 131072, "h100_sxm"),
}


class Row(NamedTuple):
    """A row of a table: `line` of the page, and what was asked."""

    line: int
    model: str
    gpus: int
    cluster: str
    named: bool  # whether the row has the cluster
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus} {self.cluster}, {self.length}"


def rows_of(page: str) -> Iterator[Row]:
    """The rows that the planner has answered."""
    asked: tuple[int, int, str | None] | None = None
    for number, line in enumerate(page.splitlines()):
        if line in TABLES:
            asked = TABLES[line]
        elif line.startswith("## "):
            asked = None
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if asked and cells and cells[0] in MODELS:
            batch, length, cluster = asked
            yield Row(
                number,
                cells[0],
                int(cells[1].replace(",", "")),
                cluster or cells[2].strip("`"),
                not cluster,
                batch,
                length,
            )


def answered(row: Row) -> str:
    """The row as the planner answers now."""
    keys = [f"batch.global={row.batch}", f"model.sequence_length={row.length}"]
    given = dict.fromkeys(("max_memory", "tokens", "days", "budget", "routing"))
    files = [f"configs/model/{MODELS[row.model]}.yaml"]
    asked = ask(argparse.Namespace(files=files, overrides=keys, cluster=row.cluster, offload=False, **given))
    found = asked.search(row.gpus, 1)
    cells = [row.model, f"{row.gpus:,}", *([f"`{row.cluster}`"] if row.named else [])]
    if found.results:
        best, of = found.results[0], found.results[0].prediction
        cells += [
            layout_text(best.choice),
            seconds_text(of.seconds),
            f"{of.tokens_per_second:,.0f}",
            f"{of.mfu:.1%}",
            f"{best.memory / GIB:.1f} GiB",
            f"{of.exposed:.1%}",
        ]
    else:
        assert found.tightest is not None
        near = nearest(asked, row.gpus)
        assert near is not None
        cells += [f"none fits; the nearest needs {near[1].total / GIB:,.0f} GiB", *[""] * 5]
    return re.sub(r" +", " ", f"| {' | '.join(cells)} |")


def main() -> None:
    path = Path(sys.argv[1])
    lines = path.read_text(encoding="utf-8").splitlines()
    for row in rows_of("\n".join(lines)):
        new = answered(row)
        if new != lines[row.line]:
            print(f"- {lines[row.line]}\n+ {new}")
        lines[row.line] = new
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
