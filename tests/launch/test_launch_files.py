"""Files in folders that somebody has prepared: nothing outside of them changes, and nothing is waited for."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite_launch.base import files
from megalite_launch.base.events import append_event, read_events
from megalite_launch.base.files import (
    PRIVATE_MODE,
    SHARED_MODE,
    appended,
    kept,
    opened,
    read_bytes,
    read_end,
    write_whole,
)
from megalite_launch.base.outcome import Failure, read_failures, write_failure
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.commands import run
from megalite_launch.status import page
from megalite_launch.supervise.batch_host_guard import Heart
from megalite_launch.supervise.other_supervisors import lock

PRECIOUS = "of somebody else"
NODE = ["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "localhost"]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.write_text(PRECIOUS)
    return path


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def second_name(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [link, second_name, pipe])
def test_a_whole_file_takes_the_place_of_whatever_is_there(
    plant: Callable[[Path, Path], None], victim: Path, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    plant(path, victim)
    plant(tmp_path / f".page.html.{os.getpid()}", victim)  # a name that could be foreseen
    write_whole(path, "new", SHARED_MODE)
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("new", False, PRECIOUS)


def test_a_name_that_was_foreseen_all_the_same_is_not_written_through(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "known")
    (tmp_path / ".page.html.known").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "page.html", "new")
    assert victim.read_text() == PRECIOUS


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_event(path, "begin", "supervisor", "text"),
        lambda path: appended(path).close(),
        lambda path: os.close(opened(path, os.O_RDWR | os.O_CREAT)),
        lambda path: os.close(opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
    ],
)
@pytest.mark.parametrize(
    ("plant", "told"), [(link, "is a link"), (second_name, "has a second name"), (pipe, "is no regular file")]
)
def test_nothing_is_added_to_another_file(
    plant: Callable[[Path, Path], None], told: str, write: Callable[[Path], object], victim: Path, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    plant(path, victim)
    with pytest.raises(OSError, match=told):
        write(path)
    assert victim.read_text() == PRECIOUS


def test_a_log_that_cannot_be_opened_ends_no_job(victim: Path, tmp_path: Path) -> None:
    (tmp_path / "srun.log").symlink_to(victim)
    with kept(tmp_path / "srun.log") as log:
        assert log.write(b"said") == 4
    heart = Heart(tmp_path / "4711.0.beat")
    heart.path.symlink_to(victim)
    heart.start()
    heart.stop()
    assert victim.read_text() == PRECIOUS


def test_a_pipe_is_not_waited_for_by_those_who_read(tmp_path: Path) -> None:
    for name in ("events.jsonl", "fail-00000.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="is no regular file"):
        read_events(tmp_path / "events.jsonl")
    assert read_failures(tmp_path) == []


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "begin", "supervisor", "text")
    os.truncate(path, 2**40)
    assert read_events(path) == []
    assert read_end(path, 3) == b"\0\0\0"


def test_records_are_for_their_owner_and_pages_for_all(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        append_event(tmp_path / "events.jsonl", "begin", "supervisor", "text")
        write_failure(tmp_path, Failure(0.0, 0, "node", 1, 1, "why"))
        page.write(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"events.jsonl": PRIVATE_MODE, "fail-00000.json": PRIVATE_MODE, "status.html": 0o644}


@pytest.mark.parametrize("name", ["events.jsonl", "attempts", "logs"])
def test_a_supervisor_refuses_a_folder_that_leads_elsewhere(
    name: str, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    for program, options in (("supervise", ["--backend", "local"]), ("node", NODE)):
        assert run(program, [*options, "--run", str(folder), "--", "true"]) == 2
        assert f"{folder / name}: is a link; put what it leads to in its place" in capsys.readouterr().err
    assert (victim.read_text(), [path.name for path in folder.iterdir()]) == (PRECIOUS, [name])


def test_the_lock_of_a_supervisor_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="is a link"):
        lock(RunFolder(tmp_path))
    assert not (tmp_path / "made").exists()


def test_a_link_is_read_where_people_have_put_one(victim: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    assert read_bytes(tmp_path / "link", 2) == b"of"
