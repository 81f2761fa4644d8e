"""What is in the way in a run folder is told before anything starts, all of it, and by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.config.errors import InputError
from megalite.train import folder
from megalite.train.folder import FILES, FOLDERS, Folder

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
    monkeypatch.setattr(folder.os, "access", lambda path, _: Path(path) not in (tmp_path / "metrics.jsonl", tmp_path))
    with pytest.raises(InputError) as caught:
        Folder(tmp_path).check(1)
    assert str(caught.value).count("cannot be written to") == 3
    assert f"\n  {tmp_path}: cannot be written to\n  {tmp_path / 'metrics.jsonl'}: cannot be" in str(caught.value)


def test_links_to_where_a_run_can_write_are_welcome(tmp_path: Path) -> None:
    for name in (*FOLDERS, *FILES):
        target = tmp_path / f"scratch/{name}"
        target.parent.mkdir(exist_ok=True)
        target.touch() if name in FILES else target.mkdir()
        (tmp_path / name).symlink_to(target)
    Folder(tmp_path).check(2)
    Folder(tmp_path / "not/there/yet").check(2)
