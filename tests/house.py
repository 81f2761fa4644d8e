"""Measures how the code is laid out: `python tests/house.py`, or `make house`.

A room is a package with its own modules. An arrow leads from a room to another one that it imports. A floor is the
longest chain of arrows below a room. Imports come from import-linter's graph, which reads the source and runs nothing.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOTS = {"megalite": "megalite", "kernels": "megalite_kernels", "launch": "megalite_launch", "tools": "megalite_tools"}
SHARED_NAMES = 2  # rooms in which a name is counted as one with several meanings


def sources(root: str) -> Iterator[tuple[str, Path]]:
    """The room and the path of every Python file below a folder."""
    for path in sorted(Path(root).rglob("*.py")):
        yield ".".join((ROOTS[root], *path.parent.relative_to(root).parts)), path


def arrows_between(rooms: set[str]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    graph = grimp.build_graph(*ROOTS.values(), cache_dir=None)
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = tuple(name if name in rooms else name.rpartition(".")[0] for name in (module, imported))
            if pair[0] != pair[1] and rooms.issuperset(pair):
                found.add(pair)
    return found


def reached(room: str, arrows: set[tuple[str, str]]) -> set[str]:
    """The rooms that a room imports, also by way of others."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        at = waiting.pop()
        new = {to for start, to in arrows if start == at} - found
        found |= new
        waiting += new
    return found


def circles(rooms: set[str], arrows: set[tuple[str, str]]) -> set[frozenset[str]]:
    """Groups of rooms that import each other, also by way of others."""
    below = {room: reached(room, arrows) for room in rooms}
    return {frozenset(to for to in below[room] if room in below[to]) for room in rooms if room in below[room]}


def floor_count(rooms: set[str], arrows: set[tuple[str, str]]) -> int:
    """The number of floors; a circle is one room here."""
    group = {room: min(found) for found in circles(rooms, arrows) for room in found}
    joined = {(group.get(start, start), group.get(to, to)) for start, to in arrows}
    below = {room: {to for start, to in joined if start == room != to} for room in {group.get(r, r) for r in rooms}}
    floor: dict[str, int] = {}
    while ready := [room for room in below.keys() - floor.keys() if below[room] <= floor.keys()]:
        floor |= {room: 1 + max((floor[to] for to in below[room]), default=0) for room in ready}
    return max(floor.values())


def main() -> int:
    """Print the table; the exit code is 1 where rooms import each other in a circle."""
    rooms: dict[str, list[Path]] = defaultdict(list)
    modules: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, set[str]] = defaultdict(set)
    lines = 0
    for root in ROOTS:
        for room, path in sources(root):
            text = path.read_text(encoding="utf-8")
            lines += text.count("\n")
            if path.stem.strip("_") not in ("init", "main"):
                rooms[room].append(path)
                modules[path.stem].add(room)
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].add(str(path))
    arrows = arrows_between(set(rooms))
    found = circles(set(rooms), arrows)
    table = Table("measure", "number", "most")
    largest = max(rooms, key=lambda room: len(rooms[room]))
    table.add_row("rooms", str(len(rooms)), f"{largest}: {len(rooms[largest])} files")
    table.add_row("arrows between rooms", str(len(arrows)), "")
    table.add_row("floors", str(floor_count(set(rooms), arrows)), "")
    table.add_row("circles of rooms", str(len(found)), "; ".join(" ".join(sorted(each)) for each in found))
    table.add_row("files", str(sum(map(len, rooms.values()))), "")
    table.add_row("lines", f"{lines:,}", "")
    for title, names in (("module names of several rooms", modules), ("class names of several modules", classes)):
        shared = sorted(
            (name for name in names if len(names[name]) >= SHARED_NAMES), key=lambda name: -len(names[name])
        )
        table.add_row(title, str(len(shared)), ", ".join(f"{name} {len(names[name])}" for name in shared[:8]))
    Console().print(table)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
