"""What is in the way in a run folder is told before anything starts, all of it, and by name."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, Unhealthy
from megalite.base.exit_codes import ExitCode
from megalite.train.folder import paths
from megalite.train.folder.lock import Lock
from megalite.train.folder.paths import FILES, FOLDERS, Folder
from megalite_launch.base.files import LINKS, foreign

BOARD = "tensorboard/events.out.tfevents.1795885221"
NEITHER = "neither a file nor a folder"


def dangle(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def turn(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "wanted", "told"),
    [
        (Path.mkdir, [*FILES, "logs/rank_0001.log"], "must be a file, but is a folder"),
        (Path.touch, [*FOLDERS, "."], "must be a folder, but is a file"),
        (os.mkfifo, FILES, f"must be a file, but is {NEITHER}"),
        (os.mkfifo, FOLDERS, f"must be a folder, but is {NEITHER}"),
        (dangle, FILES, "must be a file, but is a link that leads nowhere"),
        (dangle, [*FOLDERS, ".", ".."], "must be a folder, but is a link that leads nowhere"),
        (turn, ["metrics.jsonl", "checkpoints"], "Too many levels of symbolic links"),
    ],
)
def test_what_is_in_the_way_is_named(
    make: Callable[[Path], None], wanted: list[str], told: str, tmp_path: Path
) -> None:
    for number, name in enumerate(wanted):
        run = tmp_path / f"dir{number}/run"
        path = Path(os.path.normpath(run / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        with pytest.raises(InputError) as caught:
            Folder(run).check(2)
        assert str(caught.value).count("\n") == 2
        assert f"\n  {path}: {told}\n" in str(caught.value)


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).mkdir()
    with pytest.raises(InputError) as caught:
        Folder(tmp_path).check(1)
    assert all(f"{tmp_path / name}: must be a file" in str(caught.value) for name in FILES)


def test_what_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system tells it: root may write everywhere but on a file system that is mounted for reading."""
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(paths.os, "access", lambda path, _: Path(path) not in (tmp_path / "metrics.jsonl", tmp_path))
    with pytest.raises(InputError) as caught:
        Folder(tmp_path).check(1)
    assert str(caught.value).count("cannot be written to") == 3
    assert f"\n  {tmp_path}: cannot be written to\n  {tmp_path / 'metrics.jsonl'}: cannot be" in str(caught.value)


def elsewhere(path: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    target.touch() if "." in path.name else target.mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_checkpoints_may_lie_elsewhere_and_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(tmp_path / "run/checkpoints", tmp_path / "scratch/checkpoints")
    (tmp_path / "link").symlink_to("run")
    Folder(tmp_path / "link").check(2)
    Folder(tmp_path / "not/there/yet").check(2)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_mode=stat.S_IFLNK, st_uid=7))
    assert foreign(tmp_path / "run/checkpoints") == "is a link of another user; put your own in its place"


@pytest.mark.parametrize("name", sorted({*FOLDERS, *FILES, "logs/rank_0001.log", "logs/flight", BOARD} - {*LINKS}))
def test_nothing_else_may_lead_elsewhere(name: str, tmp_path: Path) -> None:
    """A folder that somebody has prepared would have a run change other files."""
    path = tmp_path / "run" / name
    elsewhere(path, tmp_path / "scratch/target")
    with pytest.raises(InputError, match=f"\n  {path}: is a link; put what it leads to in its place\n"):
        Folder(tmp_path / "run").check(2)


def test_a_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "metrics.jsonl").hardlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"metrics.jsonl: has a second name, a hard link"):
        Folder(tmp_path).check(1)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, Unhealthy), (errno.EDQUOT, Unhealthy), (errno.EACCES, InputError)]
)
def test_a_disk_that_is_full_at_a_start_is_no_bad_input(
    number: int,
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No other input would help: the exit code is 4, as for a save that finds no room."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code = ExitCode.UNHEALTHY if kind is Unhealthy else ExitCode.BAD_INPUT
    for start in (Folder(tmp_path).make, lambda: Lock.take(tmp_path)):
        with pytest.raises(kind, match=os.strerror(number)):
            start()
        assert exit_code("megalite train", lambda start=start: start() and None) == code
    assert capsys.readouterr().err.count("make room") == (2 if kind is Unhealthy else 0)
