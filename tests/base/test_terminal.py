"""What commands print for people."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from megalite.base.output import warn
from megalite.base.terminal import escaping, gib_above, sections, table
from megalite.commands.main import main
from megalite.distributed.start.failure_report import tell
from megalite.distributed.start.ranks import RankInfo
from megalite_launch.base.errors import UserError

GIB = 1 << 30
HOSTILE = "[red]H100\x1b]0;owned\x07\x9b2J\u202e"


@given(st.integers(1, 1 << 50))
def test_the_gib_that_are_asked_for_are_enough_and_hardly_more(size: int) -> None:
    told = gib_above(size)
    assert size <= round(float(told) * GIB)
    assert float(told) * GIB <= 1.0101 * size
    assert len(told.replace(".", "").strip("0").partition("e")[0]) <= 3


@pytest.mark.parametrize("terminal", [True, False])
def test_texts_of_files_steer_no_terminal(terminal: bool) -> None:
    out = io.StringIO()
    on = escaping(Console(file=out, markup=False, highlight=False, force_terminal=terminal, width=120))
    shown = table("name", text=("name",))
    shown.add_row(HOSTILE)
    sections(on, [(HOSTILE, shown), ("kept", Text(f"line\n{HOSTILE}", style="red"))])
    on.print(HOSTILE, HOSTILE, soft_wrap=True)
    assert out.getvalue().count("[red]H100\\x1b]0;owned\\x9b2J\\u202e") == 5
    assert set(out.getvalue()) & set("\x07\x9b\u202e") == set()
    assert ("\x1b" in out.getvalue()) is terminal  # colours of our own


@pytest.mark.parametrize("command", ["plan", "show"])
def test_a_cluster_s_texts_reach_terminal_and_page_escaped(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, page = Path("configs/cluster/h100_sxm.yaml").read_text(), tmp_path / "page.html"
    cluster = tmp_path / ("c[bold]\x1b[2J<b>.yaml" if command == "plan" else "c[bold]<b>.yaml")
    cluster.write_text(known.replace("NVIDIA H100 SXM5 80 GB", r'"[red]H100\e]0;owned\a\x9b2J\u202e<b>"'))
    given = [command, "configs/model/tiny.yaml", "batch.global=8", "--cluster", str(cluster)]
    given += ["--gpus", "2", "--html", str(page)] if command == "plan" else []
    assert main(given) == 0
    told = capsys.readouterr()
    texts = [told.out, told.err] + ([page.read_text()] if command == "plan" else [])
    assert "[red]H100\\x1b]0;owned\\x9b2J\\u202e<b>" in told.out
    assert not any(set(text) & set("\x1b\x07\x9b\u202e") for text in texts)
    assert not any("<b>" in text for text in texts[2:])


def test_a_rank_s_words_and_warnings_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    warn(HOSTILE)
    tell(1, f"Traceback\n{HOSTILE}", RankInfo(0, 1, 0))
    with pytest.raises(UserError, match=r"\\x1b\]0;owned"):
        raise UserError(HOSTILE)
    assert set(capsys.readouterr().err) & set("\x1b\x07\x9b\u202e") == set()
