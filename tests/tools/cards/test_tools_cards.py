"""Cards: the program works, and every preset is of a family."""

from dataclasses import replace
from pathlib import Path

import pytest
from page_cases import Page
from warm_start import run

from megalite.base.files import read_object
from megalite.commands.report.run_facts import Start
from megalite_tools.cards.card import Card
from megalite_tools.cards.cards import main
from megalite_tools.cards.families import FAMILIES, RESUMED_AT, STEPS
from megalite_tools.cards.pages import COLUMNS, card_page, markdown, passed

ROOT = Path(__file__).parents[3]
ROW = {"quantity": "loss", "difference": 1e-15, "tolerance": 1e-12, "passed": True, "where": "step <1>"}
LOSSES = {step: 6.0 - step / 10 for step in range(1, STEPS + 1)}
CARD = Card(
    "Gemma 2", 1000, ("parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=1"), {"differences": [ROW]}, LOSSES, LOSSES,
    {"model": "Gemma2ForCausalLM", "tokens": 64, "difference": 1e-7},
    Start("001", {"packages": {"torch": "2.13"}, "commit": None, "python": "3.11"}),
)  # fmt: skip


def lines(text: str) -> list[list[str]]:
    """The cells of the table's rows, the header first."""
    found = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [found[0], *found[2:]]


def test_every_preset_is_of_one_family() -> None:
    presets = [preset for family in FAMILIES.values() for preset in family]
    assert sorted(presets) == sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))


def test_a_number_above_its_limit_fails() -> None:
    assert passed(CARD)
    far = LOSSES | {RESUMED_AT + 1: LOSSES[RESUMED_AT + 1] * (1 + 2e-9)}
    assert passed(replace(CARD, resumed=LOSSES | {RESUMED_AT: 9.0})), "before the resumption it is another run's"
    for bad in (
        replace(CARD, resumed=far),
        replace(CARD, logits=CARD.logits | {"difference": 2e-5}),
        replace(CARD, verified={"differences": [ROW, ROW | {"difference": None, "passed": False}]}),
    ):
        assert not passed(bad)
        page = Page(card_page(bad))
        assert "failed" in page.text
        assert [name for name in page.loaded if name != "href"] == []
    assert lines(markdown([bad]))[1][4] == "loss not finite"


def test_a_folder_of_others_is_not_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["--out", str(tmp_path)]) == 2
    assert "is no folder of cards" in capsys.readouterr().err
    assert main(["Gemma 9", "--out", str(tmp_path / "new")]) == 2
    assert "choose from megalite, DeepSeek-V2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_table_is_of_the_present_form_and_has_every_family() -> None:
    """`make cards` makes it again."""
    header, *rows = lines((ROOT / "docs/cards.md").read_text())
    assert tuple(header) == COLUMNS
    assert [row[0] for row in rows] == list(FAMILIES)
    assert [row[1] for row in rows] == [", ".join(presets) for presets in FAMILIES.values()]
    text = markdown([CARD])
    assert text.partition("\n| family")[0].splitlines()[:5] == (ROOT / "docs/cards.md").read_text().splitlines()[:5]
    assert text.partition("- *layout*")[2] == (ROOT / "docs/cards.md").read_text().partition("- *layout*")[2]


@pytest.mark.timeout(300)
def test_the_smallest_family_has_a_card(tmp_path: Path) -> None:
    """In a process of its own, whose ranks are forks: this one may have computed something."""
    pytest.importorskip("transformers")
    out = tmp_path / "cards"
    arguments = ["megalite", "--out", str(out), "--table", str(tmp_path / "table.md")]
    done = run(["-m", "megalite_tools.cards.cards", *arguments], timeout=280)
    assert done.returncode == 0, done.stderr
    assert "megalite: passed" in done.stdout
    _, row = lines((tmp_path / "table.md").read_text())
    assert row[0] == "megalite"
    assert row[3] == "pp=2 tp=2"
    assert float(row[6]) <= 1e-12, "float64"
    assert row[7] == "LlamaForCausalLM"
    verified = read_object(out / "megalite/verify.json", 10**6)
    assert [each["quantity"] for each in verified["differences"]][:2] == ["loss", "gradient norm"]
    page = Page((out / "megalite.html").read_text())
    assert "passed" in page.text
    report = Page((out / "megalite/run.html").read_text())
    assert "resumed at step 10" in report.text
    assert report.loaded == []
    assert "megalite.html" in (out / "index.html").read_text()
