"""Writes weights in another format: strip by strip, in bounded memory, into a folder that is whole or not there.

Files are written into a hidden folder beside the target and hashed on the way. Files that are whole stay there when
the program is stopped, and the same request goes on from them. When all is on the disk, the folder gets its name.
"""

import fcntl
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash

from megalite.base.errors import InputError
from megalite.base.files import check_copied, exists, is_file, is_folder, look
from megalite.base.json_bounds import parse
from megalite.checkpoint.store.disk import File, check_hashes, synchronize, write_durably
from megalite.checkpoint.store.files import BUFFER_BYTES, HashedFile
from megalite.checkpoint.store.finite import SQUARES_PREFIX
from megalite.checkpoint.store.index import ITEM_BYTES
from megalite.checkpoint.weights import peft_factors
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.output import Output, OutputPlan, Stream, Written
from megalite.checkpoint.weights.maps.peft import Factor
from megalite.checkpoint.weights.maps.strips import Strip, Theirs, boxes
from megalite.checkpoint.weights.maps.woven import groups
from megalite.checkpoint.weights.read import check_base, reader_of
from megalite.checkpoint.weights.reader import Reader
from megalite.checkpoint.weights.woven import interleaved
from megalite.config.convert import to_plain
from megalite.config.schema import Config
from megalite_launch.base.files import appended, read_bytes

BLOCK = 1 << 24  # bytes of a tensor that a worker holds at a time, unless a row is larger
JOURNAL = "journal.jsonl"  # in the hidden folder: the request, then every file that is whole
MAX_JOURNAL_BYTES = 1 << 28
Advanced = Callable[[int], None]


def convert(
    found: Weights,
    plan: OutputPlan,
    target: Path,
    request: Mapping[str, Any],
    workers: int = 1,
    advanced: Advanced = lambda _: None,
) -> dict[str, Written]:
    """Write the folder `target` as `plan` says, its tensors from `found`. Returns its large files.

    request: what decides the content; unfinished work for another request is thrown away. advanced: called with the
    bytes that are written, first with those that an earlier attempt wrote, then from any thread. Raises InputError if
    there is something at `target`, or if another process writes it, and DamagedError if `found` cannot be read.
    """
    if look(target, follow=False) is not None:
        raise InputError(f"{target}: is there already, and is not overwritten; move it away or give another path")
    for path in plan.copies.values():
        check_copied(path)
    check_base(found)
    hidden = target.with_name(f".{target.name}.converting")
    with _told(hidden), _owned(hidden):
        written = _resumed(hidden, {**request, **_identity(found)})
        reader, stop, resumable = reader_of(found), threading.Event(), found.training is not None
        check_hashes(found.path, dict(found.hashes))
        todo = [output for output in plan.outputs if output.name not in written]
        advanced(sum(output.bytes for output in plan.outputs if output.name in written))
        with ThreadPoolExecutor(workers, "convert") as pool, ThreadPoolExecutor(workers, "flush") as beside:
            try:
                futures = {
                    pool.submit(_write, hidden, output, reader, beside, stop, advanced, resumable): output.name
                    for output in todo
                }
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                written |= {futures[future]: future.result() for future in done}
            except BaseException as error:
                stop.set()  # the other threads end at their next block
                pool.shutdown(cancel_futures=True)
                if isinstance(error, UnfitError):
                    shutil.rmtree(hidden)
                raise
        return _publish(hidden, target, plan, written)


class UnfitError(InputError):
    """The source has values that cannot be written as they are asked for. To try again is of no use."""


@contextmanager
def _told(hidden: Path) -> Iterator[None]:
    """Turns what the system refuses, a full disk for example, into an InputError."""
    try:
        yield
    except OSError as error:
        path = error.filename or hidden
        raise InputError(f"{path!s:.400}: {error.strerror}; when that is fixed, the same command goes on") from error


@contextmanager
def _owned(hidden: Path) -> Iterator[None]:
    """Make the hidden folder, and hold its lock. Raises InputError if another process has it."""
    hidden.parent.mkdir(parents=True, exist_ok=True)
    if exists(hidden, follow=False) and not is_folder(hidden, follow=False):
        raise InputError(f"{hidden}: is in the way; remove it")
    hidden.mkdir(exist_ok=True)
    descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{hidden}: another process is writing there; wait for it, or stop it") from None
        if (now := look(hidden, follow=False)) is None or now.st_ino != os.fstat(descriptor).st_ino:
            raise InputError(f"{hidden}: another process has just finished there; look at its result")
        yield
    finally:
        os.close(descriptor)


def _identity(found: Weights) -> dict[str, Any]:
    """Return the facts in which a source that has changed meanwhile would differ."""
    paths = [*(found.path / name for name in (*sorted(found.sizes), found.source)), *found.companions]
    states = {str(path): os.stat(path) for path in paths}
    return {
        "source": os.path.realpath(found.path),
        "files": {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()},
        "model": to_plain(Config(model=found.model))["model"],  # it decides where rows of tensors go
        "training": found.training and [asdict(found.training.progress), to_plain(found.training.config)],
    }


def _resumed(hidden: Path, request: dict[str, Any]) -> dict[str, Written]:
    """The files that an interrupted attempt at the same request has left whole. All else in `hidden` is deleted."""
    request = json.loads(json.dumps(request))
    text = read_bytes(hidden / JOURNAL, MAX_JOURNAL_BYTES) if is_file(hidden / JOURNAL) else b""
    first, *lines = text.splitlines() or [b""]
    whole: dict[str, Written] = {}
    for line in lines if first == json.dumps(request).encode() else []:
        if (noted := _noted(hidden, line)) is None:
            break  # it is written anew, with all that came after
        whole[noted[0]] = noted[1]
    for path in sorted(hidden.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(hidden)) not in whole:
            path.unlink()
    entries = [json.dumps(request), *(_line(name, written) for name, written in whole.items())]
    write_durably(hidden / JOURNAL, "".join(f"{entry}\n" for entry in entries))
    return whole


def _noted(hidden: Path, line: bytes) -> tuple[str, Written] | None:
    """The file that a line of the journal notes; None if the line was cut, or the file is not as it was written."""
    try:
        entry = parse(line)
        file = File(entry["bytes"], entry["xxh128"])
        check_hashes(hidden, {entry["name"]: file})
        entry["poisoned"] = [*map(str, entry["poisoned"])]
    except (ValueError, KeyError, TypeError):
        return None
    return entry["name"], Written(file, entry["note"], tuple(entry["poisoned"]), earlier=True)


def _line(name: str, written: Written) -> str:
    file = written.file
    told = {"name": name, "bytes": file.bytes, "xxh128": file.xxh128, "note": written.note}
    return json.dumps({**told, "poisoned": written.poisoned})


_journal = threading.Lock()


def _write(
    hidden: Path,
    output: Output,
    reader: Reader,
    beside: ThreadPoolExecutor,
    stop: threading.Event,
    advanced: Advanced,
    resumable: bool,
) -> Written:
    """Write a file, and note in the journal that it is whole. resumable: a run is to go on from it."""
    path = hidden / output.name
    path.parent.mkdir(parents=True, exist_ok=True)
    poisoned: dict[str, None] = {}

    def put(stream: Stream, theirs: Theirs, dtype: str) -> None:
        for block in blocks(reader, theirs, dtype):
            if stop.is_set():
                raise InputError("stopped")
            if not _finite(block):
                poisoned[_name(theirs)] = None
                _refuse_unfit(theirs, block, resumable)
            if resumable and theirs.kind == SQUARES_PREFIX and block.min() < 0:
                rule = "has negative squares, so that no run can go on; take an older checkpoint"
                raise UnfitError(f"{_name(theirs)}: {rule}")
            stream.write(block.view(torch.uint8).numpy().data)
            advanced(block.nbytes)

    with path.open("xb", buffering=BUFFER_BYTES) as file:
        hashed = HashedFile(file, beside, lambda: None)
        note = output.write(hashed, put)
        written = Written(hashed.finish(), note, tuple(poisoned))
    synchronize(path.parent)
    with _journal, appended(hidden / JOURNAL) as journal:
        journal.write(f"{_line(output.name, written)}\n".encode())
    return written


def _refuse_unfit(theirs: Theirs, block: torch.Tensor, resumable: bool) -> None:
    """Raises UnfitError where a block that is not finite is of no use."""
    if block.dtype == torch.float16:
        raise UnfitError(f"{_name(theirs)}: has values that fp16 cannot hold; use bf16 or fp32")
    if resumable:
        rule = "has NaN or infinity in it, so that no run can go on; take an older checkpoint"
        raise UnfitError(f"{_name(theirs)}: {rule}")


def _finite(block: torch.Tensor) -> bool:
    """Return whether all elements are finite, as they are if their sum is."""
    return bool(block.sum().isfinite() or block.isfinite().all())


def _name(theirs: Theirs) -> str:
    return theirs.kind + theirs.of


def blocks(reader: Reader, theirs: Theirs, dtype: str) -> Iterator[torch.Tensor]:
    """All elements of a tensor of theirs, in order, as flat blocks of a data type. Padding repeats a row."""
    if isinstance(theirs, Factor):
        yield peft_factors.made(lambda *part: reader.fill_parts([part]), theirs, getattr(torch, dtype)).flatten()
        return
    if theirs.turns:
        yield from _interleaved(reader, theirs, dtype)
        return
    strips = theirs.strips
    if not strips:
        assert theirs.padding is not None
        strips = (theirs.padding,)
    width, left = strips[0].width, theirs.elements
    most = max(1, BLOCK // (width * max(ITEM_BYTES[dtype], 4)))  # rows
    for run in _runs(strips, most):
        block = torch.empty((sum(count for *_, count in run), width), dtype=getattr(torch, dtype))
        parts, row = [], 0
        for strip, first, count in run:
            name = theirs.kind + strip.name
            for place, sizes in boxes(reader.index.tensors[name].shape, (first, first + count), strip.columns):
                height = math.prod(sizes) // width
                parts.append((name, block[row : row + height].view(sizes), place))
                row += height
        reader.fill_parts(parts)
        left -= block.numel()
        yield block.flatten()
    last = block[-1]
    while left:
        count = min(left, most * width)
        yield last.repeat(count // width)
        left -= count


def _interleaved(reader: Reader, theirs: Theirs, dtype: str) -> Iterator[torch.Tensor]:
    """The elements of a tensor that has matrices of ours in turns, an expert at a time."""
    for strips in groups(theirs):
        matrices = [torch.empty(strip.height, strip.width, dtype=getattr(torch, dtype)) for strip in strips]
        parts = []
        for strip, matrix in zip(strips, matrices, strict=True):
            name = theirs.kind + strip.name
            ((place, sizes),) = boxes(reader.index.tensors[name].shape, strip.rows, strip.columns)
            parts.append((name, matrix.view(sizes), place))
        reader.fill_parts(parts)
        yield interleaved(matrices, transposed=len(theirs.shape) == 3).flatten()


def _runs(strips: Iterable[Strip], most: int) -> Iterator[list[tuple[Strip, int, int]]]:
    """The strips in order, those that are small together: lists of a strip, its first row and a number of its rows."""
    run: list[tuple[Strip, int, int]] = []
    room = most
    for strip in strips:
        first, end = strip.rows
        while first < end:
            count = min(room, end - first)
            run.append((strip, first, count))
            first, room = first + count, room - count
            if not room:
                yield run
                run, room = [], most
    if run:
        yield run


def _publish(hidden: Path, target: Path, plan: OutputPlan, written: dict[str, Written]) -> dict[str, Written]:
    """Add the small files, and give the folder its name."""
    known = dict(written)
    for name, content in plan.texts.items():
        known[name] = _small(hidden, name, content)
    for name, path in plan.copies.items():
        known[name] = _copy(hidden, name, path)
    for name, content in plan.finish(known).items():
        _small(hidden, name, content)
    (hidden / JOURNAL).unlink()
    for folder in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
        synchronize(folder)
    if look(target, follow=False) is not None:
        raise InputError(f"{target}: is there by now, and is not overwritten; move it away or give another path")
    hidden.rename(target)
    synchronize(target.parent)
    return written


def _copy(hidden: Path, name: str, source: Path) -> Written:
    """Copy a file, some bytes at a time."""
    path, digest, size = hidden / name, xxhash.xxh3_128(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    check_copied(source)
    with source.open("rb") as there, path.open("xb") as file:
        while piece := there.read(BUFFER_BYTES):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Written(File(size, digest.hexdigest()))


def _small(hidden: Path, name: str, content: bytes) -> Written:
    path = hidden / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Written(File(len(content), xxhash.xxh3_128_hexdigest(content)))
