"""Files that are written whole, or not at all."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from megalite.config.errors import InputError
from megalite.config.files import write_whole
from megalite.stop import Stopped, listen, restore, stop


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
