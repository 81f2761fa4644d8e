"""The measures of `make house`."""

from pathlib import Path

import pytest
from house import circles, floor_count, main

ROOMS = {"a", "b", "c", "d", "e"}
ARROWS = {("a", "b"), ("b", "c"), ("c", "b"), ("b", "d"), ("a", "e")}


def test_rooms_that_import_each_other_are_a_circle() -> None:
    assert circles(ROOMS, ARROWS) == {frozenset({"b", "c"})}
    assert circles(ROOMS, ARROWS - {("c", "b")}) == set()


def test_floors_are_the_longest_chain_with_a_circle_as_one_room() -> None:
    assert floor_count(ROOMS, ARROWS) == 3
    assert floor_count(ROOMS, ARROWS - {("c", "b")}) == 3
    assert floor_count(ROOMS, ARROWS | {("d", "e")} - {("c", "b")}) == 4


def test_the_code_has_no_circle_of_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main() == 0
