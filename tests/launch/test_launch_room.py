"""Whether there is room wherever a run writes, on file systems of their own."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite_launch import commands
from megalite_launch.base.events import read_events
from megalite_launch.base.files import write_whole
from megalite_launch.base.free_space import no_room
from megalite_launch.commands import run
from megalite_launch.submit import launch_command

Mount = Callable[[Path, str], None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a small file system at a folder."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("name", [".", "logs", "checkpoints", "tokenizer", "anything"])
def test_every_folder_of_a_run_counts(tmp_path: Path, mount: Mount, name: str) -> None:
    disk = tmp_path / "disk"
    mount(disk, "size=2m")
    if name == ".":
        path = disk
    else:
        path = tmp_path / "run" / name
        path.parent.mkdir()
        path.symlink_to(disk)
    of = tmp_path / "disk" if name == "." else tmp_path / "run"
    assert no_room(of) == ""
    fill(disk)
    assert no_room(of) == f"{path}: No space left on device"
    (disk / "filler").unlink()
    assert no_room(of) == ""
    assert list(disk.iterdir()) == []


def test_a_file_system_without_inodes_is_full(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "disk", "size=4m,nr_inodes=2")
    assert no_room(tmp_path / "disk") == ""
    (tmp_path / "disk/last").touch()
    assert no_room(tmp_path / "disk") == f"{tmp_path / 'disk'}: No space left on device"


def test_a_launcher_on_a_full_disk_leaves_no_file_and_says_why(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount(tmp_path / "disk", "size=2m")
    (tmp_path / "disk/launch").mkdir()
    fill(tmp_path / "disk")
    path = tmp_path / "disk/launch/001.config.yaml"
    for write in (launch_command._write, write_whole):
        program = SimpleNamespace(main=lambda _, write=write: write(path, "x" * 5000))
        monkeypatch.setattr(commands, "import_module", lambda *_, program=program: program)
        assert commands.run("launch", []) == 4
        assert capsys.readouterr().err == f"megalite-launch: error: {path}: No space left on device\n"
        assert list(path.parent.iterdir()) == []


def test_a_run_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert no_room(tmp_path / "run") == ""
    assert not (tmp_path / "run").exists()


def test_a_job_without_a_supervisor_ends_on_a_full_disk(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "run/logs", "size=2m")
    fill(tmp_path / "run/logs")
    options = ["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "a", "--run", str(tmp_path / "run")]
    (tmp_path / "run/logs/filler").rename(tmp_path / "run/logs/other")
    assert run("node", [*options, "--job", "j", "--", "sh", "-c", "exit 3"]) == 4
    end = read_events(tmp_path / "run/events.jsonl")[-1]
    assert (end["event"], end["code"]) == ("end", 4)
    assert f"{tmp_path}/run/logs: No space left on device" in end["reason"]


def test_a_file_system_that_counts_no_blocks_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096))
    assert no_room(tmp_path) == ""
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=4096))
    assert no_room(tmp_path) == f"{tmp_path}: No space left on device"
