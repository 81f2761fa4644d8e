"""Configurations whose files were edited since their job was submitted."""

import sys
import time
from pathlib import Path

import pytest
from fake_slurm import World

from megalite_launch.base.events import read_events
from megalite_launch.supervise.frozen_configuration import Frozen
from megalite_launch.supervise.supervisor import Supervisor

BEFORE = "model:\n  layers: 2\noptim:\n  lr: 0.001\n"
PRINT = "import sys; print(open(sys.argv[1]).read(), end=''); sys.exit(int(sys.argv[2]))"


def frozen(folder: Path, now: str | None, used: bool = False, code: int = 0) -> Frozen:
    (folder / "001.config.yaml").write_text(BEFORE)
    (folder / "now").write_text(BEFORE if now is None else now)
    command = [sys.executable, "-c", PRINT, str(folder / "now"), str(code)]
    return Frozen(folder / "001.config.yaml", command, used)


def found(watch: Frozen) -> str:
    watch.look()
    assert watch._process is not None
    watch._process.wait(30)
    return watch.found()


def test_what_differs_is_told_once_for_each_edit(tmp_path: Path) -> None:
    watch = frozen(tmp_path, None)
    assert found(watch) == ""
    edit = tmp_path / "now"
    edit.write_text(BEFORE.replace("0.001", "0.002"))
    text = found(watch)
    assert "- lr: 0.001, + lr: 0.002; not used" in text
    assert f"all attempts go on with {tmp_path}/001.config.yaml" in text
    assert found(watch) == ""
    edit.write_text(BEFORE.replace("0.001", "0.003"))
    assert "+ lr: 0.003" in found(watch)
    edit.write_text(BEFORE)
    assert found(watch) == ""
    edit.write_text(BEFORE.replace("0.001", "0.003"))
    assert "+ lr: 0.003" in found(watch)


def test_an_edit_that_is_used_and_one_that_is_not_valid(tmp_path: Path) -> None:
    assert "this attempt uses the edit: - layers: 2, + layers: 3" in found(
        frozen(tmp_path, BEFORE.replace("2", "3"), used=True)
    )
    assert "is not valid any more; not used" in found(frozen(tmp_path, "", code=2))
    assert found(frozen(tmp_path, "", code=1)) == ""  # this says nothing of the files


def test_many_changes_are_cut(tmp_path: Path) -> None:
    text = found(frozen(tmp_path, "".join(f"key{number}: \x1b[31m\n" for number in range(100))))
    assert "and 98 more lines" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("edited", [True, False])
def test_the_supervisor_tells_it(tmp_path: Path, edited: bool) -> None:
    world = World(tmp_path)
    watch = frozen(tmp_path, BEFORE.replace("0.001", "0.002") if edited else None)
    supervisor: Supervisor = world.supervisor(lambda ranks: ranks.finish() if over() else None)
    supervisor.frozen = watch

    def over() -> bool:
        time.sleep(0.01)
        return "edited" in world.told() if edited else watch._process is None

    assert supervisor.run() == 0
    told = [event for event in read_events(world.folder.events) if event["event"] == "edited"]
    assert [(event["used"], event["frozen"]) for event in told] == [(False, str(watch.path))] * edited


def test_a_look_that_finds_no_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    watch = frozen(tmp_path, "model: {}")
    watch.look()
    assert watch.found() == ""
    watch.end()
