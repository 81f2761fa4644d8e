"""Timelines as text and as SVG."""

import re
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import tables

from megalite.schedule.actions import COMPUTE, Kind, Table
from megalite.schedule.draw import PEAK, SHARDING, TRANSFER, _shade, draw_svg, draw_text, title
from megalite.schedule.generate import NAMES, build
from megalite.schedule.place import place_sharding
from megalite.schedule.simulate import UNIT, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_a_timeline_of_text() -> None:
    table = build("zb_h1", 2, 3)
    timeline = simulate(table)
    assert title(table, timeline) == "zb_h1: ranks 2, stages 2, micro-batches 3, makespan 10, bubble 10.0%"
    assert draw_text(timeline, 200).plain.splitlines() == [
        "rank 0 F0 F1 ···I0 W0 F2 I1 W1 I2 W2  bubble 10.0%, peak 2",
        "rank 1 ···F0 I0 F1 I1 W0 F2 I2 W1 W2  bubble 10.0%, peak 2",
        PEAK,
    ]
    assert draw_text(timeline, 45).plain.splitlines()[0] == "rank 0 FF·IWFIWIW bubble 10.0%, peak 2"


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(60, 300))
def test_text_fits_the_terminal(table: Table, width: int) -> None:
    lines = draw_text(simulate(table), width).plain.splitlines()
    assert len(lines) == table.ranks + 1
    assert len({len(line.partition(" bubble")[0]) for line in lines[:-1]}) == 1
    assert max(map(len, lines)) <= width


def rectangles(svg: str, colours: set[str]) -> list[tuple[float, float, float]]:
    """Left, right and top of every box in one of `colours`, without the legend."""
    boxes = [box.attrib for box in ElementTree.fromstring(svg).iter(f"{SVG}rect") if box.get("fill") in colours]
    found = [(float(box["x"]), float(box["x"]) + float(box["width"]), float(box["y"])) for box in boxes]
    legend = max(top for _, _, top in found)
    return [box for box in found if box[2] < legend]


@settings(max_examples=30, deadline=None)
@given(tables())
def test_an_svg_has_every_compute_in_its_lane(table: Table) -> None:
    timeline = simulate(table)
    boxes = rectangles(draw_svg(table, timeline), {_shade(kind, local) for kind in COMPUTE for local in (0, 1)})
    lanes = sorted({top for _, _, top in boxes})
    assert len(lanes) == table.ranks
    for lane, order in zip(lanes, table.orders, strict=True):
        inside = sorted((left, right) for left, right, top in boxes if top == lane)
        assert len(inside) == len(order)
        assert all(right <= left + 0.02 for (_, right), (left, _) in pairwise(inside))


@pytest.mark.parametrize("name", NAMES)
def test_an_svg_names_the_schedule_its_bubble_and_its_colours(name: str) -> None:
    table = place_sharding(build(name, 4, 8), gather=True, reduce_each=False)
    timeline = simulate(table, {**UNIT, Kind.GATHER: Fraction(1, 2)}, transfer=Fraction(1, 4))
    svg = draw_svg(table, timeline)
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] == title(table, timeline)
    kinds = {action.kind for order in table.orders for action in order}
    assert {text[0] for text in texts if text and re.match("[FBIW]: ", text)} == set(map(str, kinds))
    transfers = sum(span.action.is_transfer for rank in timeline.spans for span in rank)
    assert len(rectangles(svg, {TRANSFER})) == transfers
    assert rectangles(svg, {SHARDING})


def test_a_name_is_no_markup() -> None:
    table = Table("<b> & co", 1, (0,), build("1f1b", 1, 1).programs)
    assert ElementTree.fromstring(draw_svg(table, simulate(table))).find(f"{SVG}title").text.startswith("<b> & co: ")
