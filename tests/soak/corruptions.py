"""What the corruption campaign does to a run folder with checkpoints of steps 10, 20 and 30, and what comes of it."""

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tampering import DATA, MANIFESTS, tamper

from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.store.manifest import INDEX, MANIFEST

OLDEST, MIDDLE, NEWEST = (f"checkpoints/step-000000{step}" for step in (10, 20, 30))
FILES = (MANIFEST, INDEX, METADATA, DATA, "__1_0.distcp")
OF_THE_RUN = ("metrics.jsonl", "config.yaml", "starts/*.json", "logs/*0.log", "lock/*[0-9]", "lock/*.free")
Change = Callable[[Path], object]  # of a file or folder


@dataclass(frozen=True)
class Case:
    """apply: is given the run folder. steps: from which training may go on; None: it may refuse, with a message."""

    group: str
    name: str
    apply: Change
    steps: tuple[int | None, ...]
    damaged: bool | None = True  # in the eyes of `megalite-inspect-checkpoint verify`; None: it knows no model
    older: bool = False  # of format 1, so `megalite-inspect-checkpoint index` comes first


class Evil:
    """Its pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def flipped(position: float, bit: int) -> Change:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes() or b"\0")
        content[int(position * len(content))] ^= 1 << bit
        file.write_bytes(content)

    return change


def cut(left: float) -> Change:
    return lambda file: os.truncate(file, max(0, min(int(left * file.stat().st_size), file.stat().st_size - 1)))


def replaced(plant: Change) -> Change:
    """`plant` something in place of a file or folder."""

    def change(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        plant(path)

    return change


def with_link(target: str) -> Change:
    return replaced(lambda path: path.symlink_to(target.format(name=path.name)))


CONTENT: dict[str, Change] = {
    "empty": cut(0),
    "half": cut(0.5),
    "a byte less": cut(1),
    "a byte more": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "noise": lambda file: file.write_bytes(random.Random(1).randbytes(file.stat().st_size)),
    "a pickle that runs a command": lambda file: file.write_bytes(pickle.dumps(Evil())),
}
KIND: dict[str, Change] = {
    "missing": replaced(lambda path: None),
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a link to nowhere": with_link("nowhere"),
    "a link to itself": with_link("{name}"),
    "a link to /dev/zero": with_link("/dev/zero"),
    "a link to /dev/full": with_link("/dev/full"),
    "a link to a file elsewhere": with_link("/etc/hostname"),
}


def flips(seed: str, count: int) -> dict[str, Change]:
    chance = random.Random(seed)
    drawn = [(0.0, 0), (0.999999, 7), *((chance.random(), chance.randrange(8)) for _ in range(count - 2))]
    return {f"bit {bit} of the byte at {100 * at:.4g} %": flipped(at, bit) for at, bit in drawn}


def cases() -> Iterator[Case]:
    yield Case("nothing", "nothing", lambda run: None, (30,), damaged=False)
    yield from files_of_checkpoints()
    yield from known_attacks()
    yield from folders()
    yield from files_of_the_run()


def files_of_checkpoints() -> Iterator[Case]:
    """Every file, first of the newest checkpoint, then of the one before."""
    few = {what: change for what, change in {**CONTENT, **KIND}.items() if what in ("half", "missing", "a folder")}
    for path, count, others, steps in ((NEWEST, 8, {**CONTENT, **KIND}, (20,)), (MIDDLE, 2, few, (30,))):
        for name in FILES:
            changes = {**flips(path + name, count), **others}
            if name not in (INDEX, METADATA):  # which are the same for every step
                changes["a file of another step"] = of_another(OLDEST)
            for what, change in changes.items():
                where = f"{path}/{name}"
                yield Case(f"a file of {path[12:]}", f"{name}: {what}", partial(at, where, change), steps)
    for number, damaged in enumerate([(NEWEST, MIDDLE), (NEWEST, MIDDLE, OLDEST)]):
        for name in FILES:
            change = partial(at_each, [f"{path}/{name}" for path in damaged], flipped(0.5, 1))
            yield Case("several checkpoints", f"{name} of {len(damaged)}", change, ((10,), (None,))[number])


def known_attacks() -> Iterator[Case]:
    """By somebody who makes sizes, hashes and digest right again."""
    for what, (change, _) in MANIFESTS.items():
        yield Case("manifest, digest right", what, partial(tampered, change), (20,))
    later = partial(tampered, lambda fields: fields.update(format=3, weather="fine"))
    yield Case("manifest, digest right", "a later format", later, (None,))
    for what, change in INDEXES.items():
        told = None if what.startswith("a tensor") or what == "no tensors" else True
        yield Case("index, hashes right", what, partial(reindexed, change), (20,), told)
    for what, header in HEADERS.items():
        yield Case("index, hashes right", what, partial(reheaded, header), (20,))
    yield Case(
        "format 1, hashes right", "nothing", partial(outdated, METADATA, bytes), (30,), damaged=False, older=True
    )
    for name, changes in OLDER.items():
        for what, content in changes.items():
            change = partial(outdated, name, content)
            yield Case("format 1, hashes right", f"{name}: {what}", change, (None,), older=True)
    for name in (METADATA, DATA):
        yield Case("pickles, hashes right", f"{name}: runs a command", partial(poisoned, name), (30,), damaged=False)


def folders() -> Iterator[Case]:
    """What has the name of a checkpoint, in place of the newest and beside it."""
    planted: dict[str, Change] = {
        "missing": lambda path: None,
        "an empty folder": Path.mkdir,
        "a file": Path.touch,
        "a pipe": os.mkfifo,
        "a link to nowhere": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to an older one": lambda path: path.symlink_to("step-00000010"),
        "a link to a whole one elsewhere": lambda path: path.symlink_to("../../elsewhere/step-00000010"),
        "an older one of another name": lambda path: shutil.copytree(path.with_name("step-00000010"), path),
    }
    for what, plant in planted.items():
        yield Case(
            "a folder", f"step 30: {what}", partial(at, NEWEST, replaced(plant)), (20,), damaged=what != "missing"
        )
        for step in ("step-00000040", "step-" + "9" * 18):
            if what != "missing":
                yield Case("a folder", f"{step[:15]}: {what}", partial(at, f"checkpoints/{step}", plant), (30,))
    for name in ("step-" + "9" * 19, "step-" + "9" * 250, "step-٠٠٠٠٠٠٤٠", "step-00000040\n", "step-1", "step-"):
        whole = partial(at, f"checkpoints/{name}", planted["an older one of another name"])
        yield Case("a folder", f"{name[:9]!r}… is no step", lambda run, whole=whole: whole(run), (30,), damaged=False)
    for suffix in (".partial", ".deleted", ".damaged"):
        for what in ("a file", "a pipe", "a link to itself", "a link to a whole one elsewhere"):
            where = f"checkpoints/step-00000040{suffix}"
            yield Case("a folder", f"{suffix}: {what}", partial(at, where, planted[what]), (30,), damaged=False)
    moved = partial(at, NEWEST, lambda path: path.rename(path.with_name("step-00000040")))
    yield Case("a folder", "step 30 renamed to 40", moved, (20,))
    for what, change in KIND.items():
        steps = (0,) if what == "missing" else (None, 0)
        yield Case("a folder", f"checkpoints: {what}", partial(at, "checkpoints", change), steps, damaged=True)


def files_of_the_run() -> Iterator[Case]:
    for name in OF_THE_RUN:
        for what, change in {**flips(name, 2), **CONTENT, **KIND}.items():
            yield Case("a file of the run", f"{name}: {what}", partial(at, name, change), (30, None), damaged=False)


def change_rows(change: Callable[[Any], None]) -> Callable[[Index], Index]:
    """`change` the rows of one tensor in place."""

    def changed(index: Index) -> Index:
        name = "model.layers.1.mlp.up.weight"
        rows = index.tensors[name].rows.copy()
        change(rows)
        return Index(index.files, {**index.tensors, name: replace(index.tensors[name], rows=rows)})

    return changed


def row(number: int, column: int, value: int) -> Callable[[Index], Index]:
    def change(rows: Any) -> None:
        rows[number, column] = value

    return change_rows(change)


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Index], Index]:
    def changed(index: Index) -> Index:
        found = dict(index.tensors)
        change(found)
        return Index(index.files, found)

    return changed


WEIGHT, STEP = "model.embed.weight", "progress.step"
INDEXES: dict[str, Callable[[Index], Index]] = {
    **{
        f"row: column {column} = {value}": row(0, column, value)
        for column in range(6)
        for value in (-1, 2**40, 2**63 - 1)
    },
    "rows: all the same": change_rows(lambda rows: rows.__setitem__(slice(None), rows[0])),
    "rows: an overlap": row(1, 2, 1),
    "a tensor is missing": tensors(lambda found: found.pop(WEIGHT)),
    "progress is missing": tensors(lambda found: found.pop(STEP)),
    "a tensor of half the width": tensors(
        lambda found: found.update({WEIGHT: replace(found[WEIGHT], dtype="float16")})
    ),
    "a tensor of whole numbers": tensors(lambda found: found.update({WEIGHT: replace(found[WEIGHT], dtype="int32")})),
    "a tensor of another": tensors(lambda found: found.update({WEIGHT: found["optimizer.exp_avg.embed.weight"]})),
    "a tensor transposed": tensors(
        lambda found: found.update({WEIGHT: replace(found[WEIGHT], shape=found[WEIGHT].shape[::-1])})
    ),
    "progress from elsewhere": tensors(lambda found: found.update({STEP: found["progress.tokens"]})),
    "progress of another type": tensors(lambda found: found.update({STEP: replace(found[STEP], dtype="float64")})),
    "one chunk less": tensors(
        lambda found: found.update({WEIGHT: replace(found[WEIGHT], rows=found[WEIGHT].rows[1:])})
    ),
    "chunks twice": tensors(
        lambda found: found.update({WEIGHT: replace(found[WEIGHT], rows=np.repeat(found[WEIGHT].rows, 2, axis=0))})
    ),
    "files by path": lambda index: Index(tuple(f"../step-00000020/{name}" for name in index.files), index.tensors),
    "files that are not there": lambda index: Index(tuple(f"x{name}" for name in index.files), index.tensors),
    "more of five dimensions": tensors(
        lambda found: found.update(more=Stored("bool", (1, 1, 1, 1, 0), np.empty((0, 12), np.int64)))
    ),
    "more of two lines": tensors(
        lambda found: found.update({"mo\nre": Stored("bool", (0,), np.empty((0, 4), np.int64))})
    ),
    "more of a long name": tensors(
        lambda found: found.update({"x" * 1001: Stored("bool", (0,), np.empty((0, 4), np.int64))})
    ),
    "no files": lambda index: Index((), index.tensors),
    "no tensors": lambda index: Index(index.files, {}),
}


HEADERS: dict[str, bytes] = {  # of an index
    "a header of lists": b"[" + b"[]," * (4 << 20),
    "a header nested deep": b"[" * 200_000,
    "a number of 5000 digits": b"9" * 5000,
}


def with_dimensions(content: bytes) -> bytes:
    """DCP's index, in which one tensor has forty."""
    metadata = pickle.loads(content)  # noqa: S301 - just written by the run
    metadata.state_dict_metadata[WEIGHT].size = torch.Size([1] * 40)
    return pickle.dumps(metadata)


def field(mark: bytes, behind: int, value: bytes) -> Callable[[bytes], bytes]:
    """A field in the directory of the first ZIP archive."""

    def changed(content: bytes) -> bytes:
        position = content.index(mark) + behind
        return content[:position] + value + content[position + len(value) :]

    return changed


KEYS = b"".join(b"\x8a\x10" + (number * (2**61 - 1)).to_bytes(16, "little") + b"N" for number in range(20_000))
OLDER: dict[str, dict[str, Callable[[bytes], bytes]]] = {  # a change of a file of format 1
    METADATA: {
        "forty dimensions": with_dimensions,
        "names joined again and again": lambda _: b"X\xa0\x86\x01\0" + b"x" * 100_000 + b"\x94" + b"h\0h\0\x93" * 9999,
        "keys of one hash": lambda _: b"\x80\x04}(" + KEYS + b"u.",
        "runs a command": lambda _: pickle.dumps(Evil()),
    },
    DATA: {
        "compressed": field(b"PK\1\2", 10, b"\x08"),
        "a header far away": field(b"PK\1\2", 42, b"\xfe\xff\xff\xff"),
        "an endless directory": field(b"PK\6\6", 40, b"\xff" * 8),
        "a directory far away": field(b"PK\6\6", 48, b"\xff" * 8),
    },
}


def at(where: str, change: Change, run: Path) -> None:
    """`where` may be a pattern, of which the last one counts."""
    change(max(run.glob(where)) if "*" in where else run / where)


def at_each(where: list[str], change: Change, run: Path) -> None:
    for name in where:
        change(run / name)


def of_another(other: str) -> Change:
    return lambda file: shutil.copy(file.parents[2] / other / file.name, file)


def tampered(change: Callable[[dict[str, Any]], object], run: Path) -> None:
    tamper(run / NEWEST, change)


def reindexed(change: Callable[[Index], Index], run: Path) -> None:
    file = run / NEWEST / INDEX
    file.write_bytes(change(Index.decode(file.read_bytes())).encode())
    tamper(run / NEWEST)


def reheaded(header: bytes, run: Path) -> None:
    (run / NEWEST / INDEX).write_bytes(len(header).to_bytes(8, "little") + header)
    tamper(run / NEWEST)


def outdated(name: str, change: Callable[[bytes], bytes], run: Path) -> None:
    """A checkpoint of format 1, of which one file is changed."""
    path = run / NEWEST
    (path / INDEX).unlink()
    (path / name).write_bytes(change((path / name).read_bytes()))
    tamper(path, lambda fields: fields.update(format=1), drop=[INDEX])


def poisoned(name: str, run: Path) -> None:
    """A pickle in place of DCP's index, or of what torch writes around every tensor."""
    file, evil = run / NEWEST / name, pickle.dumps(Evil(), 2)
    content = bytearray(file.read_bytes())
    if name == METADATA:
        content = bytearray(evil)
    position = content.find(b"\x80\x02ctorch._utils")
    while position >= 0:
        content[position : position + len(evil)] = evil
        position = content.find(b"\x80\x02ctorch._utils", position + 1)
    file.write_bytes(content)
    tamper(run / NEWEST)
