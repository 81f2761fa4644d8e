"""Cards: the program works, and every preset is of a family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from page_cases import Page
from warm_start import run

from megalite.base.errors import InputError
from megalite.base.files import read_object
from megalite.commands.report.run_facts import Start
from megalite_tools.cards import card as card_module
from megalite_tools.cards import cards
from megalite_tools.cards.card import Card, folder_name, found
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


def test_a_row_has_the_numbers_of_its_columns() -> None:
    near = replace(CARD, resumed=LOSSES | {RESUMED_AT + 2: LOSSES[RESUMED_AT + 2] * (1 + 2e-9)})
    cells = dict(zip(COLUMNS, lines(markdown([near]))[1], strict=True))
    assert cells == {
        "family": "Gemma 2", "presets": "gemma2_2b, gemma2_9b, gemma2_27b", "parameters": "1,000",
        "layout": "pp=2 tp=2", "`verify`": "loss 1.0e-15", "loss": "5.900 → 4.400", "resumed": "2.0e-09",
        "transformers": "Gemma2ForCausalLM", "logits": "1.0e-07",
    }  # fmt: skip


def test_a_page_has_both_curves_and_all_numbers() -> None:
    others = {step: loss + 0.25 for step, loss in LOSSES.items()}
    rows = [ROW, ROW | {"quantity": "gradients", "difference": 3e-13}]
    found = Page(card_page(replace(CARD, resumed=others, verified={"differences": rows})))
    for words in (
        "one rank: 4.4 at step 16", "resumed, which covers it: 4.65 at step 16", "difference: 5.7e-02 at step 16",
        "Largest difference 5.7e-02; allowed 1e-12", "gradients3.0e-131.0e-12okstep <1>",
        "Gemma2ForCausalLM, 64 tokens in float32: largest relative difference 1.0e-07; allowed 1e-05",
    ):  # fmt: skip
        assert words in found.text, words


def made(out: Path, resumed: dict[str, int] | None, losses: dict[int, float]) -> Path:
    """A folder as the programs leave it. losses: of the run that was resumed."""
    for name, its in (("uninterrupted", LOSSES), ("run", losses)):
        (out / name).mkdir(parents=True)
        records = [{"step": step, "time": 1.8e9, "loss": loss, "grad_norm": 1.0} for step, loss in its.items()]
        (out / name / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (out / "run/starts").mkdir()
    for name, record in (("001", {"resumed": None}), ("002", {"resumed": resumed})):
        (out / f"run/starts/{name}.json").write_text(json.dumps(record))
    (out / "verify.json").write_text(json.dumps(CARD.verified))
    (out / "logits.json").write_text(json.dumps(CARD.logits))
    return out


def test_a_card_is_read_of_both_runs_and_of_a_resumption(tmp_path: Path) -> None:
    others = {step: loss + 0.25 for step, loss in LOSSES.items()}
    card = found("Gemma 2", 1000, CARD.layout, made(tmp_path / "good", {"step": RESUMED_AT}, others))
    start = Start("002", {"resumed": {"step": RESUMED_AT}})
    assert card == replace(CARD, resumed=others, start=start)
    cut = {step: loss for step, loss in LOSSES.items() if step != RESUMED_AT + 1}
    for name, resumed, losses, told in (
        ("anew", None, LOSSES, r"002\.json: resumed is None, not at step 10"),
        ("earlier", {"step": 5}, LOSSES, "not at step 10"),
        ("cut", {"step": RESUMED_AT}, cut, "has no loss of step 11"),
    ):
        with pytest.raises(InputError, match=told):
            found("Gemma 2", 1000, CARD.layout, made(tmp_path / name, resumed, losses))


def test_a_card_shows_what_verify_finds_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "main", lambda arguments: 1)
    card_module._do("verify", "tiny")
    with pytest.raises(InputError, match="megalite train tiny: ended with exit code 1"):
        card_module._do("train", "tiny")


def test_a_family_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(family: str, store: Path, out: Path) -> Card:
        if family == "Gemma 3":
            raise InputError("megalite train: ended with exit code 4")
        return replace(CARD, family=family, logits=CARD.logits | {"difference": 1.0 * (family == "OLMo 3")})

    monkeypatch.setattr(cards, "make", make)
    table = tmp_path / "table.md"
    table.write_text("before")
    arguments = ["--out", str(tmp_path / "cards"), "--table", str(table)]
    assert main(["Gemma 3", "Gemma 2", "OLMo 3", *arguments]) == 1
    told = capsys.readouterr().out
    assert "Gemma 3: FAILED, and has no card. megalite train: ended with exit code 4\nGemma 2: passed" in told
    assert told.endswith("2 of 3 families failed: Gemma 3, OLMo 3\n")
    pages = {path.stem for path in (tmp_path / "cards").glob("*.html")}
    assert pages == {"index", folder_name("Gemma 2"), folder_name("OLMo 3")}
    assert table.read_text() == "before"
    assert main(["Gemma 2", "OLMo 3", *arguments]) == 1
    assert [row[0] for row in lines(table.read_text())[1:]] == ["Gemma 2", "OLMo 3"]
    assert main(["Gemma 3", *arguments]) == 1
    assert main(["Gemma 2", *arguments]) == 0


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
    assert 1e-8 < float(row[8]) < 1e-5, "float32"
    verified = read_object(out / "megalite/verify.json", 10**6)
    assert [each["quantity"] for each in verified["differences"]][:2] == ["loss", "gradient norm"]
    page = Page((out / "megalite.html").read_text())
    assert "passed" in page.text
    report = Page((out / "megalite/run.html").read_text())
    assert "resumed at step 10" in report.text
    assert report.loaded == []
    assert "megalite.html" in (out / "index.html").read_text()
