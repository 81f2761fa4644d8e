"""Saves that fail, or leave something behind: nothing that was saved is lost, and the run hears of it."""

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import Ranks
from toy_jobs import config_of, fail_on_one_rank, make, one_rank, progress_at, restorer, saver

from megalite.base.errors import Unhealthy
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.disk import check_hashes
from megalite.checkpoint.store.files import HashingFileSystem
from megalite.checkpoint.store.manifest import MANIFEST, check_sizes, complete
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Failed, Outcome, Saved
from megalite.config.layout import Layout
from megalite.train.build import Job


@pytest.fixture
def job() -> Iterator[Job]:
    with one_rank():
        yield make(config_of(Layout()))


def failed(news: list[Outcome]) -> list[int]:
    assert all(isinstance(item, Failed) for item in news), news
    return [item.step for item in news]


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Every write beyond `limit` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_failed_save_is_reported_and_leaves_the_others_alone(job: Job, tmp_path: Path) -> None:
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        writer.finish()
        with file_size_limit(10_000):
            writer.save(progress_at(job, 2))
            with pytest.raises(Unhealthy, match=r"the last checkpoint could not be written: .*File too large"):
                writer.finish()
        _, second = writer.news()
        assert isinstance(second, Failed)
        assert "File too large" in second.error
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        writer.save(progress_at(job, 3))
        writer.finish()
    assert [path.name for path in complete(tmp_path)] == ["step-00000001", "step-00000003"]
    check_hashes(tmp_path / "step-00000003", check_sizes(tmp_path / "step-00000003").files)


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_a_full_disk_is_told_in_plain_words_whatever_pytorch_says(elements: int) -> None:
    """Its writer of archives says `enforce fail at inline_container.cc`."""
    with ThreadPoolExecutor(1) as beside:
        files = HashingFileSystem(beside, lambda: None)
        with (
            pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
            files.create_stream("/dev/full", "wb") as stream,
        ):
            torch.save(torch.zeros(elements), cast(Any, stream))


def test_who_has_lost_the_folder_deletes_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LostError(Exception):
        pass

    def lost() -> None:
        raise LostError

    def fail(self: Saver, *_: object) -> None:
        monkeypatch.setattr(self._publisher, "check_owner", lost)
        raise OSError("stale file handle")

    monkeypatch.setattr(Saver, "_write_mine", fail)
    writer = saver(job, tmp_path)
    writer.save(Progress(step=1))
    with pytest.raises(LostError):
        writer.wait()
    assert [path.suffixes[0] for path in tmp_path.iterdir()] == [".partial"]


def test_more_failures_in_a_row_than_allowed_stop_training(job: Job, tmp_path: Path) -> None:
    job.config.checkpoint.max_failures = 2
    with saver(job, tmp_path) as writer:
        for step in (1, 2, 4, 5):
            with file_size_limit(10_000):
                writer.save(progress_at(job, step))
                writer.wait()
            if step == 2:
                writer.save(progress_at(job, 3))  # one in between succeeds, so the count begins anew
                writer.wait()
                assert failed(writer.news()[:2]) == [1, 2]
        with file_size_limit(10_000):
            writer.save(progress_at(job, 6))
            writer.wait()
        with pytest.raises(Unhealthy, match=r"3 checkpoints in a row could not be written: .*File too large"):
            writer.save(progress_at(job, 7))
    assert [path.name for path in complete(tmp_path)] == ["step-00000003"]


@contextmanager
def file_system(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes at `folder`, where one may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "megalite-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(job: Job, tmp_path: Path) -> None:
    """Room for one checkpoint and a half."""
    with saver(job, tmp_path / "elsewhere") as writer:
        writer.save(progress_at(job, 1))
        writer.finish()
        (first,) = writer.news()
    assert isinstance(first, Saved)
    folder = tmp_path / "disk/checkpoints"
    with file_system(tmp_path / "disk", first.bytes * 3 // 2 + 20_000), saver(job, folder) as writer:
        for step in (1, 2):
            writer.save(progress_at(job, step))
            writer.wait()
        first, second = writer.news()
        assert isinstance(first, Saved)
        assert isinstance(second, Failed)
        assert "No space left on device" in second.error
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        assert restorer(job).all(folder / "step-00000001").step == 1


def failed_save(job: Job, folder: Path) -> str:
    with saver(job, folder) as writer:
        writer.save(progress_at(job, 1))
        writer.wait()
        (item,) = writer.news()
    assert isinstance(item, Failed)
    return item.error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(job: Job, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in failed_save(job, tmp_path / "checkpoints")


def test_a_folder_that_is_a_file(job: Job, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    assert "Not a directory" in failed_save(job, tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints").read_text() == "mine"


@pytest.mark.parametrize("where", ["writing", "not shared"])
def test_what_fails_on_one_rank_fails_for_all(where: str, ranks: Ranks, tmp_path: Path) -> None:
    """And all go on together: the next save succeeds."""
    config = config_of(Layout(pp=2, dp_shard=2, tp=2))
    results = ranks.run(fail_on_one_rank, config, tmp_path, where)
    assert len({error for error, _ in results}) == 1
    expected = "do all nodes share this file system" if where == "not shared" else "disk of rank 5 is broken"
    assert expected in results[0][0]
    assert [steps for _, steps in results] == [[2]] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_name_that_is_taken_is_not_written_over(job: Job, tmp_path: Path) -> None:
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        writer.finish()
        before = (tmp_path / "step-00000001" / MANIFEST).read_text()
        writer.save(replace(progress_at(job, 1), samples=99))
        with pytest.raises(Unhealthy, match="step-00000001 is there already"):
            writer.finish()
    assert (tmp_path / "step-00000001" / MANIFEST).read_text() == before


def test_what_an_interrupted_save_left_is_deleted_before_there_is_something_new(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is never used again: who was taken for dead may still write there."""
    names = ["step-00000001.partial", "step-00000001.partial.77", "step-00000009.deleted.2"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    seen: list[list[str]] = []
    write = Saver._write_mine

    def noted(self: Saver, *given: object) -> object:
        seen.append(os.listdir(tmp_path))
        return write(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Saver, "_write_mine", noted)
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
    (((partial,),),) = (seen,)
    assert partial.startswith("step-00000001.partial.")
    assert partial not in names
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_what_cannot_be_deleted_is_told_once_and_undoes_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.config.checkpoint.keep = 1
    left = tmp_path / "step-00000001.partial"
    left.mkdir()
    delete = shutil.rmtree

    def refused(path: Path) -> None:
        if path == left:
            raise PermissionError(errno.EPERM, "not yours")
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", refused)
    problems = []
    with saver(job, tmp_path) as writer:
        for step in (2, 3, 4):
            writer.save(progress_at(job, step))
            writer.finish()
            (news,) = writer.news()
            assert isinstance(news, Saved)
            problems.append(news.problems)
    assert problems == [(f"{left} cannot be deleted: not yours",), (), ()]
    assert sorted(os.listdir(tmp_path)) == [left.name, "step-00000004"]
    assert restorer(job).all(tmp_path / "step-00000004").step == 4


def test_a_name_that_cannot_be_flushed_is_told_and_nothing_older_deleted(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.config.checkpoint.keep = 1
    fail, flush = [False], os.fsync

    def failing(descriptor: int) -> None:
        if fail[0] and os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    problems = []
    with saver(job, tmp_path) as writer:
        for step in (1, 2, 3):
            fail[0] = step == 2
            writer.save(progress_at(job, step))
            writer.finish()
            (news,) = writer.news()
            assert isinstance(news, Saved)
            problems.append(news.problems)
            if step == 2:
                assert [path.name for path in complete(tmp_path)] == ["step-00000001", "step-00000002"]
                assert restorer(job).all(news.path).step == 2
    told = f"{tmp_path}/step-00000002 may not survive a crash of this machine, so nothing older is deleted: [Errno 5]"
    assert problems[1][0].startswith(told)
    assert (problems[0], problems[2]) == ((), ())
    assert os.listdir(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("plant", ["symlink_to", "write_text"])
def test_a_name_that_a_link_or_a_file_has_is_refused(plant: str, job: Job, tmp_path: Path) -> None:
    getattr(tmp_path / "step-00000001", plant)("nowhere")
    assert "step-00000001 is there already" in failed_save(job, tmp_path)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_an_owner_that_cannot_be_told_ends_no_run(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system does not answer while a failed save is cleared away."""

    def unknown() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def fail(self: Saver, *_: object) -> None:
        monkeypatch.setattr(self._publisher, "check_owner", unknown)
        raise OSError("stale file handle")

    monkeypatch.setattr(Saver, "_write_mine", fail)
    assert "stale file handle" in failed_save(job, tmp_path)
