"""Additions of a run to a trace: the rank and steps that it is of, and their prediction."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalite.base.json_shape import Each, OrNull, ValueKind, misfits, whole
from megalite.config.layout import AXES as COORDINATES
from megalite.profiling.expected import SHAPE as EXPECTED
from megalite.profiling.expected import Expected
from megalite.profiling.kinds import AXES

AXIS = ValueKind("one of " + ", ".join(AXES), lambda value: isinstance(value, str) and value in AXES)
SHAPE = {
    "rank": whole(0, 31),
    "first": whole(1, 53),
    "last": whole(1, 53),
    "pp": whole(1, 31),
    "coordinates": {axis: whole(0, 31) for axis in COORDINATES},
    "axes": Each(AXIS),
    "expected": OrNull(EXPECTED),
}


@dataclass(frozen=True)
class About:
    """Rank, and first and last profiled step. coordinates: its place in the layout. axes: by process group."""

    rank: int
    first: int
    last: int
    pp: int
    coordinates: Mapping[str, int]
    axes: Mapping[str, str]
    expected: Expected | None

    @staticmethod
    def read(told: Any) -> "About":
        """The additions as `plain` has made them. Raises ValueError for others."""
        for problem in misfits(told, SHAPE, "megalite"):
            raise ValueError(problem)
        if told["last"] < told["first"] or told["coordinates"]["pp"] >= told["pp"]:
            raise ValueError("megalite: last must be at least first, and pp of coordinates below pp")
        return About(**{**told, "expected": told["expected"] and Expected.read(told["expected"])})

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "expected": self.expected and self.expected.plain()}

    @property
    def steps(self) -> int:
        """The number of profiled steps."""
        return self.last - self.first + 1
