from dataclasses import replace
from pathlib import Path

import pytest
from page_cases import Page, asked_of

from megalite.commands.main import main
from megalite.commands.plan.gpu_counts import FACTORS, scaling
from megalite.commands.plan.page.page import compared_page, ranked_page
from megalite.commands.plan.request import as_is
from megalite.commands.plan.tables import layout_text, step_text
from megalite.cost.predict import Prediction
from megalite_launch.base.texts import memory_text

HOSTILE = "<img src=x onerror=alert(1)>&\"'.yaml"


@pytest.fixture(scope="module")
def ranked():
    """A question, what the search found, and its page."""
    asked = asked_of("parallel.tp=2", "parallel.pp=2", tokens=1e9)
    found = asked.search(16, 3)
    return (
        asked,
        found,
        ranked_page(
            asked, ["plan", "x.yaml"], "A heading", found, "As told.", found.results[0].prediction, searched=True
        ),
    )


def loads_nothing(page: str) -> bool:
    rest = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    return not (Page(page).loaded or "http:" in rest or "https:" in rest or "url(" in rest or "@import" in rest)


def test_a_page_has_the_numbers_of_every_layout(ranked):
    asked, found, page = ranked
    text = Page(page).text
    assert len(found.results) == 3
    for result in found.results:
        of = result.prediction
        total = memory_text(asked.predict(of.config)[1].total)
        numbers = (layout_text(result.choice), step_text(of), f"{of.tokens_per_second:,.0f}", total)
        assert [number for number in numbers if number not in text] == []


def test_a_page_has_all_its_parts(ranked):
    text = Page(ranked[2]).text
    for heading in ("A heading", "megalite plan x.yaml", "As told.", "Where a step's time goes", "Where memory goes",
                    "Pipeline timeline", "Who talks to whom", "Strong scaling", "Weak scaling"):  # fmt: skip
        assert heading in text


def test_a_page_loads_nothing(ranked):
    assert loads_nothing(ranked[2])


def test_pictures_are_well_formed_and_named(ranked):
    pictures = Page(ranked[2]).pictures
    assert len(pictures) == 3 + 3 + 1 + 3 + 2  # bars of time and memory, timeline, tp and dp and pp, scaling
    for picture in pictures:
        assert picture.get("aria-label") or picture.find("{http://www.w3.org/2000/svg}title") is not None


def test_names_are_escaped():
    asked = asked_of("batch.micro=1")
    pair = asked.predict(as_is(asked, 4))
    page = compared_page([asked, asked], ["plan", HOSTILE], [HOSTILE, "other.yaml"], [pair, pair])
    assert loads_nothing(page)
    assert HOSTILE in Page(page).text


def test_scaling_keeps_the_layout_but_for_data_parallelism():
    asked = asked_of("parallel.tp=2", "batch.micro=1")
    own = asked.predict(as_is(asked, 8))[0]
    for grows in (False, True):
        points = scaling(asked, own, None, grows)
        assert [point.gpus for point in points] == [8 * factor for factor in FACTORS]
        for point, factor in zip(points, FACTORS, strict=True):
            same = point.same
            assert isinstance(same, Prediction)
            assert point.best is None
            assert same.gpus == point.gpus
            assert same.config.parallel.tp == 2
            assert same.config.batch.global_ == point.batch == (64 * factor if grows else 64)


def test_the_best_layout_is_never_slower_than_the_same_one():
    asked = asked_of("parallel.cp=1", "parallel.data.mode=zero1", "train.recompute=none")
    own = asked.search(8, 1).results[0].prediction
    points = scaling(asked, own, own, grows=False)
    assert len(points) == len(FACTORS)
    for point in points:
        assert point.best
        assert point.same is None or point.best.seconds <= point.same.seconds * (1 + 1e-9)


def test_scaling_leaves_out_what_does_not_fit():
    asked = asked_of("batch.micro=1", "parallel.data.mode=zero3")
    own, memory = asked.predict(as_is(asked, 8))
    tight = replace(asked, limit=memory.total + 1)  # half of the ranks hold twice the shards
    points = scaling(tight, own, None, grows=False)
    assert [point.gpus for point in points if point.same is None] == [4]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--gpus", "4-8", "--tokens", "1B"], ["Time against cost", "a step, ms", "8 GPUs", "The fastest layout"]),
        (["--gpus", "4-8"], ["Time of a step by number of GPUs"]),
        (["--gpus", "4", "--as-is", "batch.micro=2"], ["The layout", "It fits:", "Scaling"]),
        (["--gpus", "1", "--as-is", "batch.micro=2"], ["talks to nobody"]),
        (
            ["--gpus", "4", "--as-is", "batch.micro=2", "model.experts.count=8", "parallel.ep=4"],
            [" ep 4 ", "tokens, what experts make of them", "Experts are taken to be chosen equally often"],
        ),
        (["--gpus", "4", "--compare", "configs/model/tiny.yaml", "batch.micro=2"], ["2 configurations", "tiny.yaml"]),
    ],
)  # fmt: skip
def test_the_command_writes_a_page(options: list[str], parts: list[str], tmp_path: Path):
    path = tmp_path / "page.html"
    assert main(["plan", "configs/model/small_60m.yaml", "batch.global=64", "--html", str(path), *options]) == 0
    page = path.read_text()
    text = Page(page).text
    assert [part for part in parts if part not in text] == []
    assert loads_nothing(page)
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "page.html"
    path.write_text("mine")
    assert main(["plan", "configs/model/small_60m.yaml", "--gpus", "4", "--html", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "there is such a file already" in capsys.readouterr().err
