import re
from pathlib import Path

import pytest

from megalite.schedule.communicators import SPLITS
from megalite.schedule.generate import NAMES, build
from megalite_tools.bench.communicators import compare, main

DOCS = Path(__file__).parents[3] / "docs/benchmarks.md"


def test_every_schedule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks=2", "--transfers=0.1", "--jitters=0.2", "--draws=1"]) == 0
    table = capsys.readouterr().out
    for name in NAMES:
        assert re.search(rf"^{name} +2 +0\.1 +0\.2( +\d+\.\d\d%){{3}} +\d+%", table, re.M)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipev"])
def test_the_documentation_has_what_the_simulation_says(name: str) -> None:
    found = compare(build(name, 4, 16), 0.025, 0.1, draws=10, seed=0)
    cells = [f"{found[split][0]:.2%}".replace("%", " %") for split in SPLITS]
    assert f"| `{name}` | 4 | {' | '.join(cells)} |" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("argument", ["--jitters=1.5", "--draws=0", "--ranks=0", "--transfers=-1.0"])
def test_bad_input_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert f"{argument}: must be from" in capsys.readouterr().err
