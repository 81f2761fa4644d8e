"""The file system of checkpoints: room, speed, and what another node reads."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite_launch.preflight import storage
from megalite_launch.preflight.findings import Finding, Sheet
from megalite_launch.preflight.storage import (
    WrittenFile,
    check_room,
    check_shm,
    checkpoint_bytes,
    judge_write,
    read_back,
    write,
)
from megalite_launch.preflight.thresholds import load_thresholds

LIMITS = load_thresholds().of("NVIDIA H200")
GIB = 2**30


@pytest.fixture
def sheet() -> Sheet:
    return Sheet("n1", "light")


def the(sheet: Sheet, check: str) -> Finding:
    (finding,) = (finding for finding in sheet.findings if finding.check == check)
    return finding


def disk(monkeypatch: pytest.MonkeyPatch, free: float, inodes: int = 10**6, files: int = 10**7) -> None:
    found = SimpleNamespace(f_bavail=int(free // 4096), f_frsize=4096, f_favail=inodes, f_files=files)
    monkeypatch.setattr(storage.os, "statvfs", lambda path: found)


@pytest.mark.parametrize(("free", "result"), [(60, "ok"), (59, "warn"), (30, "warn"), (29, "fail")])
def test_there_must_be_room_for_some_checkpoints(
    sheet: Sheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, result: str
) -> None:
    disk(monkeypatch, free * GIB)
    check_room(sheet, tmp_path, 10 * GIB, LIMITS)
    assert (the(sheet, "free space").result, the(sheet, "free space").value) == (result, free / 10)


def test_how_much_room_is_enough_depends_on_a_size_that_may_not_be_known(sheet: Sheet, tmp_path: Path) -> None:
    check_room(sheet, tmp_path, None, LIMITS)
    assert the(sheet, "free space").result == "unchecked"
    assert "--checkpoint-size" in the(sheet, "free space").text


@pytest.mark.parametrize(
    ("inodes", "files", "result"), [(100_000, 10**6, "ok"), (99_999, 10**6, "fail"), (0, 0, "unchecked")]
)
def test_inodes_are_counted_where_a_file_system_has_them(
    sheet: Sheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, files: int, result: str
) -> None:
    disk(monkeypatch, GIB, inodes, files)
    check_room(sheet, tmp_path, None, LIMITS)
    assert the(sheet, "free inodes").result == result


@pytest.mark.parametrize(("free", "result"), [(16, "ok"), (15.9, "fail")])
def test_shared_memory_must_have_room(sheet: Sheet, monkeypatch: pytest.MonkeyPatch, free: float, result: str) -> None:
    disk(monkeypatch, free * GIB)
    check_shm(sheet, LIMITS)
    assert the(sheet, "/dev/shm").result == result


def test_what_cannot_be_looked_at_fails(sheet: Sheet, tmp_path: Path) -> None:
    check_room(sheet, tmp_path / "none", None, LIMITS)
    check_shm(sheet, LIMITS, tmp_path / "none")
    assert [finding.result for finding in sheet.findings] == ["fail", "fail"]
    assert "No such file" in sheet.reason


@pytest.mark.parametrize("size", [1, 2**22, 2**22 + 5])
def test_what_is_written_is_read_back_and_measured(sheet: Sheet, tmp_path: Path, size: int) -> None:
    written = write(tmp_path, "n2", size)
    assert written.path.stat().st_size == size
    read_back(sheet, "n2", written.note(), 1.0, LIMITS)
    assert the(sheet, "read back").result == "ok"
    assert sheet.measured["read_back"]["match"] is True
    assert sheet.measured["read_back"]["of"] == "n2"


def test_no_two_blocks_of_a_file_are_equal(tmp_path: Path) -> None:
    data = write(tmp_path, "n1", 3 * storage.BLOCK).path.read_bytes()
    assert len({data[place : place + storage.BLOCK] for place in range(0, len(data), storage.BLOCK)}) == 3


def test_other_bytes_fail(sheet: Sheet, tmp_path: Path) -> None:
    written = write(tmp_path, "n2", 1000)
    data = bytearray(written.path.read_bytes())
    data[500] ^= 1
    written.path.write_bytes(data)
    read_back(sheet, "n2", written.note(), 1.0, LIMITS)
    assert the(sheet, "read back").result == "fail"
    assert "other bytes than n2 has written" in sheet.reason


def test_a_file_that_is_seen_late_is_a_warning_and_one_never_seen_a_failure(
    sheet: Sheet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path, "n2", 1000)
    hidden = tmp_path / "hidden"
    written.path.rename(hidden)
    threading.Timer(0.2, lambda: hidden.rename(written.path)).start()
    quick = type(LIMITS)({**LIMITS.values, "visible_seconds": 0.1})
    read_back(sheet, "n2", written.note(), 5.0, quick)
    assert the(sheet, "read back").result == "warn"
    assert 0.1 < sheet.measured["read_back"]["visible_seconds"] < 2
    written.path.unlink()
    other = Sheet("n1", "light")
    read_back(other, "n2", written.note(), 0.1, LIMITS)
    assert the(other, "read back").result == "fail"
    assert "not to be seen here" in other.reason


@pytest.mark.parametrize(("nodes", "result"), [(2, "ok"), (1, "fail")])
def test_a_node_must_write_its_part_in_time(sheet: Sheet, nodes: int, result: str) -> None:
    written = WrittenFile(Path("x"), 256 * 2**20, "", 1.0)  # 268 MB/s; 300 s for a checkpoint
    judge_write(sheet, written, 100 * GIB, nodes, LIMITS)
    assert the(sheet, "write").result == result
    assert sheet.measured["write"]["rate"] == 256 * 2**20


def test_a_small_file_or_an_unknown_checkpoint_is_not_judged_by_speed(sheet: Sheet) -> None:
    judge_write(sheet, WrittenFile(Path("x"), 2**20, "", 1e3), 100 * GIB, 1, LIMITS)
    judge_write(sheet, WrittenFile(Path("x"), 2**28, "", 1e3), None, 1, LIMITS)
    assert [finding.result for finding in sheet.findings] == ["ok", "ok"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, "n1", 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_as_large_as_its_files(tmp_path: Path) -> None:
    assert checkpoint_bytes(tmp_path) is None
    for name, size in (("step-00000010/a", 10), ("step-00000020/rank/b", 7), ("step-00000020/c", 5)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    assert checkpoint_bytes(tmp_path) == 12
    assert checkpoint_bytes(tmp_path / "none") is None
