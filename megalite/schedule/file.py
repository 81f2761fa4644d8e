"""Schedules as text: what each rank computes, in order; transfers and sharding are added when it is read.

name: my 1f1b
micro_batches: 2
placement: [0, 1]        # stage -> the pipeline rank that owns it
ranks:                   # for each rank KIND STAGE.MICRO-BATCH, the kinds F, and B or I and W
  - F0.0 F0.1 B0.0 B0.1
  - F1.0 B1.0 F1.1 I1.1 W1.1
times: [[1, 2, 1, 1], [1.5, 3, 1.5, 1.5]]  # optional: of each stage the times of F, B, I and W, to place transfers by
"""

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from megalite.base.errors import InputError, counted
from megalite.config.rules.parallel import MAX_SCHEDULE_BYTES
from megalite.config.yaml import read_mapping
from megalite.schedule.actions import COMPUTE, MAX_ACTIONS, Action, Kind, Table, Times
from megalite.schedule.check import malformed, uncomputed
from megalite.schedule.communication import communicate

KEYS = {
    "name": "a text",
    "micro_batches": "a whole number above 0",
    "placement": "a list of ranks",
    "ranks": "a list of texts",
}
TIMES = "times"  # the only key that may be left out
ACTION = re.compile(rf"([{''.join(COMPUTE)}])([0-9]{{1,6}})\.([0-9]{{1,6}})")
MAX_TIME = 1e9  # time of an action; sums of longer ones lose what short ones add
MAX_LISTED = 8  # problems told of one file


def read(path: Path) -> Table:
    """The schedule in the file `path`. Raises InputError, with the name of the file and all that is wrong in it."""
    content = read_mapping(path, MAX_SCHEDULE_BYTES)
    try:
        return complete(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def complete(content: dict[str, Any]) -> Table:
    """The schedule that a file's `content` describes, able to run. Raises InputError with all that is wrong."""
    _check_keys(content)
    name, m, placement = content["name"], content["micro_batches"], tuple(content["placement"])
    words = [order.split() for order in content["ranks"]]
    actions = {word: _action(word) for order in words for word in order}
    _refuse(
        f"rank {rank} has {word!r}, which is not a kind of {', '.join(COMPUTE)} with STAGE.MICRO-BATCH, as in F0.3"
        for rank, order in enumerate(words)
        for word in order
        if actions[word] is None
    )
    _refuse(["micro_batches is more than all actions of the ranks"] * (m > sum(map(len, words))))
    moved = sum(a != b for a, b in pairwise(placement))
    count = (
        max(sum(map(len, words)), 2 * m * len(placement)) + 4 * moved * m
    )  # where some are missing, as many as need be
    _refuse(
        [f"makes {count:,} actions, transfers included, more than the {MAX_ACTIONS:,} that can be planned"]
        * (count > MAX_ACTIONS)
    )
    orders = tuple(tuple(action for word in order if (action := actions[word])) for order in words)
    times = _times(content.get(TIMES), len(placement))
    table = Table(name, m, placement, orders)
    beyond = sorted({rank for rank in placement if not 0 <= rank < table.ranks})
    _refuse(
        f"placement names rank {rank}, but the file has {counted(table.ranks, 'rank')}, counted from 0"
        for rank in beyond[:MAX_LISTED]
    )
    idle = [f"rank {rank} has no stage in placement" for rank in range(table.ranks) if rank not in placement]
    _refuse(idle or malformed(table) or uncomputed(table))
    return Table(name, m, placement, communicate(orders, placement, times), times)


def write(table: Table) -> str:
    """The text from which `read` makes an equal table; sharding is left out."""
    name = yaml.safe_dump(table.name, default_style='"', width=math.inf)  # in quotes whatever it looks like: 1e5, null
    head = f"name: {name}micro_batches: {table.micro_batches}\n"
    ranks = [" ".join(f"{a.kind}{a.stage}.{a.micro}" for a in order) for order in table.orders]
    times = "" if table.times is None else f"{TIMES}: {list(map(list, table.times))}\n"
    return f"{head}placement: {list(table.placement)}\nranks:\n" + "".join(f"  - {rank}\n" for rank in ranks) + times


def _check_keys(content: dict[str, Any]) -> None:
    """Raises InputError unless the keys of the file are there, each of its type."""
    if content.keys() - {TIMES} != KEYS.keys():
        raise InputError(f"must have the keys {', '.join(KEYS)}, may have {TIMES}, and no others")
    right = {
        "name": isinstance(content["name"], str),
        "micro_batches": _is_number(content["micro_batches"]) and content["micro_batches"] > 0,
        "placement": isinstance(content["placement"], list) and all(map(_is_number, content["placement"])),
        "ranks": isinstance(content["ranks"], list) and all(isinstance(order, str) for order in content["ranks"]),
    }
    _refuse(f"{key} must be {KEYS[key]}, not {content[key]!r:.80}" for key, fine in right.items() if not fine)


def _times(value: Any, stages: int) -> Times | None:
    """The key `times`. Raises InputError unless it has four times above 0 for every stage, or is left out."""
    if value is None:
        return None
    rows = value if isinstance(value, list) else []
    right = len(rows) == stages and all(isinstance(row, list) and len(row) == len(COMPUTE) for row in rows)
    if not right or not all(_is_time(time) and (time or at == 3) for row in rows for at, time in enumerate(row)):
        kinds = ", ".join(COMPUTE)
        raise InputError(
            f"{TIMES} must be a list of {stages}, one for each stage, of the times of {kinds}, of which only "
            f"that of W may be 0, and at most {MAX_TIME:g} each"
        )
    return tuple((float(f), float(b), float(i), float(w)) for f, b, i, w in rows)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIME


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _action(word: str) -> Action | None:
    match = ACTION.fullmatch(word)
    return Action(Kind(match[1]), int(match[2]), int(match[3])) if match else None


def _refuse(problems: Iterable[str]) -> None:
    """Raises InputError if there are problems."""
    listed = list(problems)
    if listed:
        more = [f"and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
        raise InputError("; ".join([*listed[:MAX_LISTED], *more]))
