"""Files that are written whole, or not at all."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from megalite.base.errors import InputError
from megalite.base.files import check_writable, write_new, write_whole
from megalite.base.stop_signals import Stopped, listen, restore, stop


def a_link(path: Path) -> None:
    path.with_name("target").write_text("kept")
    path.symlink_to("target")


def term() -> None:
    signal.raise_signal(signal.SIGTERM)


def term_in_another_thread() -> None:
    """As happens in a process of several threads: one that does not block the signal takes it."""

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        term()

    thread = Thread(target=take)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (Path.mkdir, "is a folder; name a file in it"),
        (os.mkfifo, "is a device or a pipe; name a file"),
        (a_link, "is a link, and stays one; name the file that it leads to"),
    ],
)
def test_what_is_no_regular_file_stays_as_it_is(make: Callable[[Path], object], rule: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path)
    before = path.lstat().st_ino, sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=rule):
        write_whole(path, "new")
    assert (path.lstat().st_ino, sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_a_path_that_names_no_file_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        write_whole(Path(name), "new")


@pytest.mark.parametrize("ask", [term, term_in_another_thread])
def test_a_signal_waits_until_the_file_is_there(
    ask: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: ask())
    before = listen(stop)
    try:
        with pytest.raises(Stopped):
            write_whole(tmp_path / "out", "new")
    finally:
        restore(before)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "new")]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    path = tmp_path / "out"
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: path.write_text("of another run"))
        with pytest.raises(InputError, match="there is such a file already"):
            write_new(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("out", "of another run")]
    path.unlink()
    write_new(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("out", "new")]


def test_a_file_is_not_written_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        write_new(tmp_path / "out", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_into_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "new" / "folder" / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is no folder"):
        check_writable(tmp_path / "file" / "out")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="may not write into"):
        check_writable(tmp_path / "new" / "out")
