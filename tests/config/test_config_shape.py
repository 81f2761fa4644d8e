"""Where JSON has not the shape that it must have."""

import pytest

from megalite.base.json_shape import TEXT, WHOLE_NUMBER, Each, OrNull, digits, misfits, whole

SHAPE = {
    "count": whole(0, 4),
    "hash": digits(2),
    "end": OrNull(whole(1, 4)),
    "names": Each(TEXT),
    "sources": [{"path": TEXT}],
    "process": WHOLE_NUMBER,
}
GOOD = {"count": 3, "hash": "0f", "end": None, "names": {"a": "b"}, "sources": [{"path": "p"}], "process": -1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"end": 15, "names": {}, "sources": []}, []),
        ({"count": 16}, ["x: 'count' = 16: must be a whole number from 0 to 2**4 - 1"]),
        ({"count": True}, ["x: 'count' = True: must be a whole number from 0 to 2**4 - 1"]),
        ({"process": False}, ["x: 'process' = False: must be a whole number"]),
        ({"hash": "0g"}, ["x: 'hash' = '0g': must be 2 digits from 0 to f"]),
        ({"end": 0}, ["x: 'end' = 0: must be a whole number from 1 to 2**4 - 1"]),
        ({"names": {"a": 1}}, ["x: 'names': 'a' = 1: must be text"]),
        ({"sources": {}}, ["x: 'sources' = {}: must be a list"]),
        ({"sources": [1, {}]}, ["x: 'sources'[0] = 1: must be an object", "x: 'sources'[1]: 'path' is missing"]),
        ({"more": 1}, ["x: 'more' is unknown"]),
    ],
)
def test_every_misfit_is_told_with_its_place(changes: dict[str, object], told: list[str]) -> None:
    assert list(misfits(GOOD | changes, SHAPE, "x")) == told


def test_what_is_no_object_has_no_fields() -> None:
    assert list(misfits([], SHAPE, "x")) == ["x = []: must be an object"]
