from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_cases import SVG, Page, asked_of

from megalite.commands.plan.page.bars import Bar, stacked
from megalite.commands.plan.page.traffic_map import communication, spans
from megalite.commands.plan.request import as_is
from megalite.cost.cluster import load_cluster
from megalite.cost.flows import Flow
from megalite.cost.network import Group
from megalite_launch.page.html import Key, table
from megalite_launch.page.lines import Axis, Line, line_chart

PREDICTION = asked_of().predict(as_is(asked_of("batch.global=512", "batch.micro=1"), 512))[0]
KEYS = [Key("a & b", "c0"), Key("<c>", "c1"), Key("d", "c2")]
SIZES = st.lists(st.floats(0.01, 100), min_size=3, max_size=3)
ALLOWED = 1e-3  # of a unit: coordinates are written with three digits, those of lines with one


@given(st.lists(SIZES, min_size=1, max_size=4), st.floats(1, 400))
def test_bars_are_as_long_as_their_numbers(sizes: list[list[float]], limit: float):
    bars = [
        Bar("<name>", "5 s", {key.name: size for key, size in zip(KEYS, each, strict=True)}, (sum(each) / 2, sum(each)))
        for each in sizes
    ]
    pictures = Page(stacked(bars, KEYS, str, ("limit", limit))).pictures
    scales = []
    for picture, each in zip(pictures, sizes, strict=True):
        boxes = {
            key.colour: box for key in KEYS for box in picture.iter(f"{SVG}rect") if box.get("class") == key.colour
        }
        limits = [box for box in picture.iter(f"{SVG}rect") if box.get("class") == "limit"]
        scale = float(limits[0].get("x", "")) / limit
        scales.append(scale)
        x = 0.0
        for key, size in zip(KEYS, each, strict=True):
            if key.colour in boxes:  # what is too short to see is left out
                assert float(boxes[key.colour].get("width", "")) == pytest.approx(size * scale, rel=1e-2, abs=0.01)
                assert float(boxes[key.colour].get("x", "")) == pytest.approx(x, rel=1e-2, abs=0.3)
            x += size * scale
        assert x <= 1000
        assert float(limits[0].get("x", "")) <= 1000
    assert max(scales) == min(scales)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True), st.integers(0, 1))
def test_points_lie_in_proportion(values: list[int], logarithmic: int):
    values = sorted(values)
    axis = Axis("GPUs", str, logarithmic=bool(logarithmic))
    points = [(float(value), float(value)) for value in values]
    page = Page(line_chart("<title>", axis, axis, [Line("a", points), Line("ideal", points, ideal=True)]))
    circles = list(page.pictures[0].iter(f"{SVG}circle"))
    place = (lambda value: log(value)) if logarithmic else float
    span = place(values[-1]) - place(values[0])
    for attribute in ("cx", "cy"):
        found = [float(circle.get(attribute, "")) for circle in circles]
        for value, at in zip(values, found, strict=True):
            share = (place(value) - place(values[0])) / span
            assert at - found[0] == pytest.approx(share * (found[-1] - found[0]), abs=0.2)
    assert "broken line: ideal" in page.text


def flow(size: int, stride: int) -> Flow:
    return Flow("fsdp", "weights", Group(size, stride), 1e9, 2e9, 2.0, "data")


@pytest.mark.parametrize(
    ("size", "stride", "words", "members"),
    [
        (4, 1, "inside a node", 4),
        (2, 4, "inside a node", 2),
        (16, 1, "over 2 nodes, 8 GPUs in each", 16),
        (8, 4, "over 4 nodes, 2 GPUs in each", 8),
        (64, 8, "over 64 nodes, 1 GPU in each", 4),  # of which four nodes are drawn
        (3, 6, "over 2 nodes, at most 2 GPUs in each", 3),
    ],
)
def test_a_map_shows_the_group_of_gpu_0(size: int, stride: int, words: str, members: int):
    one = flow(size, stride)
    prediction = replace(PREDICTION, parts={"data": 0.5})
    assert PREDICTION.gpus == 512
    assert spans(one, PREDICTION.cluster) == words
    page = Page(communication([one], prediction))
    squares = [box for box in page.pictures[0].iter(f"{SVG}rect") if box.get("class") == "c2"]
    assert len(squares) == members
    assert len(list(page.pictures[0].iter(f"{SVG}path"))) == members - 1
    for number in (words, "1.00 GB/s", "2.00 GB", "2.00 s", "500 ms"):
        assert number in page.text


def test_groups_inside_an_island_are_told():
    cluster = load_cluster("h100_nvl")
    assert cluster.levels[0].gpus == 2
    assert spans(flow(2, 1), cluster) == "inside an island of 2 GPUs"


@given(st.text("a1é· <>&;#\"'/=", min_size=1))
def test_cells_are_read_as_they_were_given(text: str):
    page = Page(table([text], [[Key(text, "c0")], [text]]))
    assert page.text.replace("\n", "") == 3 * text
    assert {tag for tag, _ in page.tags} == {"div", "table", "thead", "tbody", "tr", "th", "td", "i"}
