"""Timelines as text and as SVG."""

from fractions import Fraction
from itertools import combinations, pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from schedule_cases import tables

from megalite.schedule.actions import COMPUTE, Kind, Table
from megalite.schedule.communication import add_sharding
from megalite.schedule.draw import (
    DIGIT,
    FAMILIES,
    FONT,
    GROUND,
    MIN_FONT,
    PEAK,
    SHARDING_COLOUR,
    TRANSFER_COLOUR,
    draw_svg,
    draw_text,
    title,
)
from megalite.schedule.generate import NAMES, build
from megalite.schedule.simulate import UNIT, simulate

SVG = "{http://www.w3.org/2000/svg}"
MEANINGS = "F: forward   I: gradient of the input   W: gradient of the weights"


def test_the_title_has_the_sizes_and_the_bubble() -> None:
    for name, p, m, v, expected in (
        (
            "zb_h1",
            2,
            3,
            None,
            "zb_h1: p = 2 ranks, v = 1 stage per rank, m = 3 micro-batches, bubble 10.0%, makespan 10",
        ),
        ("gpipe", 1, 1, None, "gpipe: p = 1 rank, v = 1 stage per rank, m = 1 micro-batch, bubble 0.0%, makespan 3"),
        ("interleaved_1f1b", 2, 4, 4, "interleaved_1f1b: p = 2 ranks, v = 4 stages per rank, m = 4 micro-batches, "),
    ):
        table = build(name, p, m, v)
        assert title(table, simulate(table)).startswith(expected)


def test_a_timeline_of_text() -> None:
    table = build("zb_h1", 2, 3)
    timeline = simulate(table)
    assert draw_text(table, timeline, 200).plain.splitlines() == [
        "rank 0 F0 F1 ···I0 W0 F2 I1 W1 I2 W2  bubble 10.0%, peak 2",
        "rank 1 ···F0 I0 F1 I1 W0 F2 I2 W1 W2  bubble 10.0%, peak 2",
        f"FIW stages 0-1   {MEANINGS}   {PEAK}",
    ]
    assert draw_text(table, timeline, 57).plain.splitlines()[0] == "rank 0 F0F1··I0W0F2I1W1I2W2 bubble 10.0%, peak 2"
    assert draw_text(table, timeline, 45).plain.splitlines()[0] == "rank 0 FF·IWFIWIW bubble 10.0%, peak 2"


def test_a_timeline_of_many_micro_batches_has_their_numbers_where_there_is_room() -> None:
    table = build("1f1b", 2, 128)
    wide = draw_text(table, simulate(table), 10_000).plain
    assert "F126 B126      F127 B127" in wide


def test_a_timeline_longer_than_the_terminal_is_cut_and_says_so() -> None:
    table = build("zbv", 4, 64)
    lines = draw_text(table, simulate(table), 100).plain.splitlines()
    assert [len(line) for line in lines[:4]] == [100] * 4
    assert lines[0].startswith("rank 0 FFFFFFFfiwfiwfiwfiwFIW")
    assert lines[0].endswith(" bubble 0.8%, peak 8")
    assert lines[4] == "cut after 73 of 387 units of time: a picture (.svg) has all"


@settings(max_examples=60)
@given(tables(), st.integers(60, 300))
def test_text_fits_the_terminal(table: Table, width: int) -> None:
    lines = draw_text(table, simulate(table), width).plain.splitlines()
    lanes = [line for line in lines if line.startswith("rank")]
    assert len(lanes) == table.ranks
    assert len({len(line.partition(" bubble")[0]) for line in lanes}) == 1
    assert max(map(len, lines)) <= width


class Drawn(NamedTuple):
    """What stands for an action: a box, and the number in it."""

    tooltip: str
    left: float
    right: float
    top: float
    colour: str
    number: str  # "" where there is none
    length: float  # of the number


def drawn(svg: str) -> list[Drawn]:
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect").attrib, group.find(f"{SVG}text")
        left, number = float(box["x"]), "" if text is None else text.text
        length = 0.0 if text is None else float(text.attrib["font-size"]) * DIGIT * len(number)
        right, top = left + float(box["width"]), float(box["y"])
        found.append(Drawn(group.findtext(f"{SVG}title"), left, right, top, box["fill"], number, length))
    return found


def legend(svg: str) -> set[str]:
    """Its colours."""
    return {box.attrib["fill"] for box in ElementTree.fromstring(svg).findall(f"{SVG}rect")}


@settings(max_examples=30)
@given(tables())
def test_an_svg_has_every_compute_in_its_lane(table: Table) -> None:
    boxes = [box for box in drawn(draw_svg(table, simulate(table))) if box.tooltip[0] in COMPUTE and box.number]
    lanes = sorted({box.top for box in boxes})
    assert len(lanes) == table.ranks
    for lane, order in zip(lanes, table.orders, strict=True):
        inside = sorted(box for box in boxes if box.top == lane)
        assert len(inside) == len(order)
        inside.sort(key=lambda box: box.left)
        assert [box.number for box in inside] == [str(action.micro) for action in order]
        assert all(after.left >= before.right - 0.02 for before, after in pairwise(inside))


@pytest.mark.parametrize("m", [8, 12, 128, 1024])
def test_numbers_of_any_size_fit_their_boxes(m: int) -> None:
    table = build("1f1b", 2, m)
    numbers = [box for box in drawn(draw_svg(table, simulate(table))) if box.number]
    assert {int(box.number) for box in numbers} == set(range(m))
    assert all(box.length + 2 <= box.right - box.left for box in numbers)
    assert all(box.length >= MIN_FONT * DIGIT * len(box.number) - 0.01 for box in numbers)  # large enough to be read


@pytest.mark.parametrize("name", NAMES)
def test_an_svg_explains_all_it_draws(name: str) -> None:
    table = add_sharding(build(name, 4, 8), gather=True, reduce_each=False)
    timeline = simulate(table, {**UNIT, Kind.GATHER: Fraction(1, 2)}, transfer=Fraction(1, 4))
    svg = draw_svg(table, timeline)
    boxes = drawn(svg)
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] == title(table, timeline)
    assert {box.colour for box in boxes} <= legend(svg)
    kinds = {action.kind for order in table.orders for action in order}
    assert {text[0] for text in texts if text and text[1:3] == ": "} == set(map(str, kinds))
    assert [text for text in texts if text and text.startswith("stages ")] == [
        f"stages {first}-{first + 3}" for first in range(0, table.stages, 4)
    ]
    spans = [span for lane in timeline.spans for span in lane]
    assert len(boxes) == len(spans)
    assert sum(box.colour == TRANSFER_COLOUR for box in boxes) == sum(span.action.is_transfer for span in spans)
    assert any(box.colour == SHARDING_COLOUR for box in boxes)


def test_a_tooltip_has_the_action_and_its_time() -> None:
    table = build("zb_h1", 2, 3)
    tooltips = {box.tooltip for box in drawn(draw_svg(table, simulate(table, transfer=Fraction(1, 2))))}
    assert "F: forward, stage 1, micro-batch 0, time 1.5 to 2.5" in tooltips
    assert "I: gradient of the input, stage 1, micro-batch 0, time 2.5 to 3.5" in tooltips
    assert "SEND_F: output sent, stage 0, micro-batch 0, time 1 to 1.5" in tooltips


def test_stages_beyond_the_colours_begin_anew() -> None:
    table = build("interleaved_1f1b", 1, 1, 2 * len(FAMILIES))
    assert len(legend(draw_svg(table, simulate(table))) & {shade for family in FAMILIES for shade in family}) == 16


# What protanopes, deuteranopes and tritanopes see of linear RGB: Machado et al. 2009, severity 1.
BLINDNESS = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# To OKLab (B. Ottosson 2020), in which distances are those that people see; 0.02 can just be told apart.
CONES = [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.6806995, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
OKLAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.97799850, -2.42859221, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]


def perceived(colour: str, blindness: str) -> NDArray[np.float64]:
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    return np.array(OKLAB) @ np.cbrt(np.array(CONES) @ seen)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_can_be_told_apart(blindness: str) -> None:
    def distance(one: str, other: str) -> float:
        return float(np.linalg.norm(perceived(one, blindness) - perceived(other, blindness)))

    for family in FAMILIES:
        assert min(distance(*shades) for shades in combinations(family, 2)) > 0.11
    for count, least in ((2, 0.11), (4, 0.07), (8, 0.05)):
        pairs = combinations(FAMILIES[:count], 2)
        assert min(distance(*shades) for pair in pairs for shades in zip(*pair, strict=True)) > least
    assert min(distance(*shades) for shades in combinations([s for family in FAMILIES for s in family], 2)) > 0.035


def test_a_name_is_no_markup() -> None:
    table = Table("<b> & co", 1, (0,), build("1f1b", 1, 1).programs)
    assert ElementTree.fromstring(draw_svg(table, simulate(table))).findtext(f"{SVG}title").startswith("<b> & co: ")


def test_virtual_stages_are_told_apart_without_colour() -> None:
    table = build("interleaved_1f1b", 2, 2, 3)
    lines = draw_text(table, simulate(table), 200).plain.splitlines()
    assert lines[0].startswith("rank 0 F0 F1 f0 f1 F0 F1 ")
    assert lines[2].startswith("FB stages 0-1   fb stages 2-3   FB stages 4-5   F: forward")


@pytest.mark.parametrize("ranks", [2, 12, 100])
def test_names_of_ranks_end_before_their_lanes(ranks: int) -> None:
    table = build("1f1b", ranks, 2)
    picture = ElementTree.fromstring(draw_svg(table, simulate(table)))
    last = next(text for text in picture.iter(f"{SVG}text") if text.text == f"rank {ranks - 1}")
    lanes = {float(box.get("x", "")) for box in picture.iter(f"{SVG}rect") if box.get("fill") == GROUND}
    assert float(last.get("x", "")) + FONT * DIGIT * len(str(last.text)) <= max(lanes)
    assert float(picture.get("width", "")) >= max(lanes) + 100
