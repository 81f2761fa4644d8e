"""Records of PyTorch's flight recorder about the collectives of a rank.

The recorder numbers the collectives of every process group. gloo does not record messages between two ranks, so whoever
waits for one says so in its `Activity`.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d
from torch.distributed import distributed_c10d

from megalite_launch.base.files import write_whole

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
RECORDED_CALLS = 2000  # calls that a rank keeps: some steps of a deep pipeline
SENT_CALLS = 4  # calls of a group that do not end, which a rank tells the others: those behind wait for the first
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


@dataclass(frozen=True)
class Call:
    """A collective, or a message, that a rank has begun."""

    group: str
    number: int  # in its group, from 1; of a message 0
    kind: str
    tensors: str  # data types and sizes
    done: bool
    peer: int | None = None  # other rank of a message

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensors}" if self.tensors else self.kind


@dataclass(frozen=True)
class RecordedFlight:
    """The collectives of one rank: those that have not ended, and the latest, of every group."""

    calls: tuple[Call, ...] = ()
    groups: Mapping[str, tuple[str, range | tuple[int, ...]]] = field(default_factory=dict)  # name: purpose, ranks
    awaits: tuple[int, ...] = ()  # ranks that owe this one a message, or have to take one

    def to_json(self) -> dict[str, Any]:
        groups = {name: [purpose, _packed(ranks)] for name, (purpose, ranks) in self.groups.items()}
        calls = [[call.group, call.number, call.kind, call.tensors, call.done, call.peer] for call in self.calls]
        return {"calls": calls, "groups": groups, "awaits": list(self.awaits)}

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> "RecordedFlight":
        groups = {name: (purpose, _unpacked(ranks)) for name, (purpose, ranks) in found["groups"].items()}
        return RecordedFlight(tuple(Call(*values) for values in found["calls"]), groups, tuple(found["awaits"]))


def record() -> None:
    """Let process groups that are made from now on record their collectives."""
    os.environ.setdefault(BUFFER_SIZE, str(RECORDED_CALLS))


def recorded(awaits: Collection[int] = (), sent: int = SENT_CALLS, ended: int = 1) -> RecordedFlight:
    """Return what this rank has recorded. Any thread may ask. awaits: ranks that it awaits a message of.

    sent: how many calls of each group that have not ended. ended: how many of its latest, ended or not.
    """
    groups = _groups()
    calls: dict[str, list[Call]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # records of gloo, and of NCCL where PyTorch has that
        if dump := getattr(c10d, name, None):
            for entry in json.loads(dump()).get("entries", []):
                call = _call(entry, groups)
                calls.setdefault(call.group, []).append(call)
    told: list[Call] = []
    for found in calls.values():
        pending = [call for call in found if not call.done][:sent]
        told += pending + [call for call in found[-ended:] if call not in pending]
    return RecordedFlight(tuple(told), groups, tuple(awaits))


def keep(folder: Path, status: Mapping[str, Any]) -> None:
    """Write `rank_NNNNN.json`: what a rank was doing, and all that it has recorded. Raises OSError.

    status: that of a roll call.
    """
    try:
        calls = recorded(status["flight"].get("awaits", ()), RECORDED_CALLS, RECORDED_CALLS).to_json()
    except Exception:  # noqa: BLE001 - of PyTorch; what the roll call has is there
        calls = status["flight"]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"rank_{status['rank']:05d}.json", json.dumps({**status, "flight": calls}))


def _groups() -> dict[str, tuple[str, range | tuple[int, ...]]]:
    world = distributed_c10d._world
    return {
        name: (getattr(group, "group_desc", ""), _unpacked(_packed(sorted(world.pg_group_ranks[group]))))
        for group, name in list(world.pg_names.items())
        if group in world.pg_group_ranks
    }


def _call(entry: Mapping[str, Any], groups: Mapping[str, tuple[str, Sequence[int]]]) -> Call:
    group = str(entry["process_group"][0])
    kind = str(entry["profiling_name"]).partition(":")[2].lstrip("_")
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    tensors = ", ".join(
        f"{str(dtype).lower()} {list(size)}"
        for dtype, size in zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    )
    message = MESSAGE.search(kind)
    if message is None:
        return Call(group, int(entry["collective_seq_id"]), kind, tensors, done)
    ranks = groups[group][1] if group in groups else range(1 << 30)
    return Call(group, 0, message[1], tensors, done, ranks[int(message[3])])


def _packed(ranks: Iterable[int]) -> list[list[int]] | list[int]:
    """Ranks as `[[first, end, step]]` if they are that regular, which those of a mesh are; else as they are."""
    ranks = list(ranks)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[-1] + 1, step) if ranks and step > 0 else range(0)
    return [[regular.start, regular.stop, regular.step]] if ranks and list(regular) == ranks else ranks


def _unpacked(ranks: Sequence[Any]) -> range | tuple[int, ...]:
    return range(*ranks[0]) if len(ranks) == 1 and isinstance(ranks[0], list) else tuple(ranks)
