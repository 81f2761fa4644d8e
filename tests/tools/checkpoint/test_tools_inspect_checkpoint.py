"""`megalite-inspect-checkpoint`, on checkpoints of real jobs."""

import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tampering import DATA, tamper

from megalite.base.output import Outlet, give_up, stream
from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.manifest import INDEX, MANIFEST
from megalite_tools.checkpoint import checkpoints, inspect_checkpoint
from megalite_tools.checkpoint.inspect_checkpoint import main
from megalite_tools.terminal import Terminal

Inspect = Callable[..., tuple[int, str, str]]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "flipped data": (flip, DATA, "does not have the hash it was written with"),
    "flipped index": (flip, INDEX, "does not have the hash it was written with"),
    "truncated data": (truncate, DATA, "bytes instead of"),
    "missing data": (Path.unlink, DATA, "is missing"),
    "missing index": (Path.unlink, INDEX, "is missing"),
    "flipped manifest": (flip, MANIFEST, "is damaged"),
    "truncated manifest": (truncate, MANIFEST, "is damaged"),
    "missing manifest": (Path.unlink, MANIFEST, "is missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_verify_names_the_damaged_file(how: str, run: Path, inspect: Inspect) -> None:
    assert inspect("verify", run)[0] == 0
    change, file, why = DAMAGE[how]
    good, bad = sorted((run / "checkpoints").iterdir())
    change(bad / file)
    code, out, err = inspect("verify", run)
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first == f"{good}: intact"
    assert second.startswith(f"{bad}: damaged: {file} ")
    assert why in second
    assert inspect("verify", good)[0] == 0
    assert inspect("verify", good, bad)[0] == 1


def test_verify_tells_of_every_damaged_file(run: Path, inspect: Inspect) -> None:
    bad = run / "checkpoints/step-00000002"
    flip(bad / DATA)
    truncate(bad / INDEX)
    found = json.loads(inspect("verify", bad, "--json", "-")[1])["checkpoints"]
    assert [(item["path"], item["intact"]) for item in found] == [(str(bad), False)]
    assert sorted(text.split()[0] for text in found[0]["damage"]) == [DATA, INDEX]


def test_what_a_run_deletes_meanwhile_is_not_damaged(
    run: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path, *_: object) -> list[str]:
        shutil.rmtree(path)
        return [f"{DATA} is missing"]

    monkeypatch.setattr(inspect_checkpoint, "damage", gone)
    code, out, _ = inspect("verify", run / "checkpoints/step-00000001")
    assert code == 0
    assert "gone meanwhile" in out

    path = run / "checkpoints/step-00000002"
    monkeypatch.setattr(checkpoints, "check_sizes", shutil.rmtree)
    code, _, err = inspect("list", run)
    assert not path.exists()
    assert (code, "holds no checkpoint" in err) == (2, True)


def test_list_tells_the_state_of_every_folder(run: Path, inspect: Inspect) -> None:
    folder = run / "checkpoints"
    for name in ("step-00000003.partial", "step-00000000.deleted"):
        (folder / name).mkdir()
    for name in ("step-00000001.damaged", "step-00000001.damaged.2"):
        shutil.copytree(folder / "step-00000001", folder / name)
    truncate(folder / "step-00000001.damaged.2" / DATA)
    (folder / "other").mkdir()
    (folder / "step-00000009.txt").touch()
    states = {
        "step-00000000.deleted": "being deleted",
        "step-00000001": "complete",
        "step-00000001.damaged": "set aside",
        "step-00000001.damaged.2": "set aside",
        "step-00000002": "complete",
        "step-00000003.partial": "partial",
    }
    code, out, err = inspect("list", run)
    assert (code, err) == (0, "")
    for state in states.values():
        assert state in out
    assert "bytes instead of" in out

    code, out, _ = inspect("list", folder, "--json", "-")
    listed = json.loads(out)["checkpoints"]
    assert {Path(item["path"]).name: item["state"] for item in listed} == states
    assert [item["step"] for item in listed] == [0, 1, 1, 1, 2, 3]
    newest = listed[4]
    assert (newest["tokens"], newest["ranks"], newest["layout"]["tp"]) == (128, 1, 1)
    assert newest["bytes"] == sum(file.stat().st_size for file in (folder / "step-00000002").iterdir())
    assert listed[5]["tokens"] is None


def test_list_finds_damage_that_needs_no_reading(run: Path, inspect: Inspect) -> None:
    flip(run / "checkpoints/step-00000001" / DATA)
    assert inspect("list", run)[0] == 0, "only hashes tell, and they are for verify"
    (run / "checkpoints/step-00000001" / DATA).unlink()
    code, out, _ = inspect("list", run)
    assert code == 1
    assert f"damaged: {DATA} is missing" in out


def test_another_format_is_not_damage(run: Path, inspect: Inspect) -> None:
    for path in (run / "checkpoints").iterdir():
        tamper(path, lambda fields: fields.update(format=3))
    code, out, _ = inspect("list", run)
    assert code == 0
    assert out.count("has format 3; this megalite reads format 2") == 2
    assert inspect("verify", run)[0] == 2


def test_one_tensor_at_a_time_is_held(run: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0
    read = Checkpoint.read

    def watched(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(checkpoint, name)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    assert inspect("show", run, "--values")[0] == 0
    assert most == 1
    assert inspect("diff", run, run)[0] == 0
    assert most == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "nowhere"], "nowhere: no such folder"),
        (["verify", "nowhere"], "nowhere: no such folder"),
        (["show", "nowhere"], "nowhere: no such folder"),
        (["diff", "{run}", "nowhere"], "nowhere: no such folder"),
        (["list", "{run}/checkpoints/step-00000002"], "is a checkpoint itself; `show` tells what it holds, and list"),
        (["list", "{run}/.."], "holds no checkpoint; give a run folder"),
        (["verify", "{run}/.."], "holds no checkpoint; give a run folder, or one of its checkpoints"),
        (["show", "{run}", "--tensors", "nothing*"], "--tensors nothing*: no tensor has such a name"),
        (["diff", "{run}", "{run}", "--tolerance", "-1"], "--tolerance -1.0: must be 0 or more"),
        (["diff", "{run}", "{run}", "--tolerance", "nan"], "--tolerance nan: must be 0 or more"),
        (["list", "{run}", "--json", "{run}/checkpoints"], "checkpoints: is a folder; name a file in it"),
        (["list", "{run}", "--json", ""], ".: is a folder; name a file in it"),
    ],
)
def test_bad_input_exits_with_2(inspect: Inspect, run: Path, arguments: list[str], message: str) -> None:
    code, _, err = inspect(*[argument.format(run=run) for argument in arguments])
    assert code == 2
    assert err.startswith("megalite-inspect-checkpoint: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("how", ["truncated data", "flipped index", "missing manifest", "flipped manifest"])
def test_what_is_damaged_is_neither_shown_nor_compared(how: str, run: Path, inspect: Inspect) -> None:
    change, file, why = DAMAGE[how]
    change(run / "checkpoints/step-00000002" / file)
    for arguments in (["show", run], ["diff", run / "checkpoints/step-00000001", run]):
        code, out, err = inspect(*arguments)
        assert (code, out) == (2, "")
        assert f"step-00000002: {file} " in err
        assert why in err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("command", [["list"], ["verify"], ["show"], ["diff", "{run}"]])
def test_a_plain_dcp_folder_is_refused(command: list[str], run: Path, tmp_path: Path, inspect: Inspect) -> None:
    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    code, _, err = inspect(*[part.format(run=run) for part in command], tmp_path / "plain")
    assert code == 2
    assert "is a folder of PyTorch Distributed Checkpoint, but no megalite checkpoint" in err


def test_links_in_place_of_checkpoints_are_damage(run: Path, inspect: Inspect) -> None:
    (run / "checkpoints/step-00000003").symlink_to("nowhere")
    code, out, _ = inspect("verify", run)
    assert code == 1
    assert out.splitlines()[-1].startswith(f"{run / 'checkpoints/step-00000003'}: damaged: ")
    (run / "checkpoints/step-00000003").unlink()
    (run / "checkpoints/step-00000002").rename(run / "step-00000002")
    (run / "checkpoints/step-00000002").symlink_to(run / "step-00000002")
    for command in ("verify", "list"):
        code, out, _ = inspect(command, run)
        assert code == 1
        assert "damaged: is a link or a file instead of a folder" in out
    assert inspect("verify", run / "step-00000002")[0] == 0
    link = run / "checkpoints/step-00000004.partial"
    link.symlink_to(run / "step-00000002")
    listed = json.loads(inspect("list", run, "--json", "-")[1])["checkpoints"]
    assert listed[-1]["bytes"] == link.lstat().st_size


def test_an_index_that_contradicts_itself_is_damage_whatever_its_hash(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    index = Index.decode((path / INDEX).read_bytes())
    stored = index.tensors["model.embed.weight"]
    rows = np.concatenate([stored.rows, stored.rows])
    (path / INDEX).write_bytes(
        Index(index.files, {**index.tensors, "model.embed.weight": replace(stored, rows=rows)}).encode()
    )
    tamper(path)
    code, out, _ = inspect("verify", path)
    assert code == 1
    assert f"damaged: {INDEX} does not cover model.embed.weight exactly" in out


def test_values_are_read_only_from_files_as_they_were_written(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints/step-00000002"
    flip(path / DATA)
    for arguments in (["show", path, "--values"], ["diff", path, run / "checkpoints/step-00000001"]):
        code, _, err = inspect(*arguments)
        assert code == 2
        assert f"{path}: {DATA} does not have the hash it was written with" in err


def test_json_goes_to_a_file_beside_the_table(run: Path, tmp_path: Path, inspect: Inspect) -> None:
    code, out, _ = inspect("list", run, "--json", tmp_path / "new/list.json")
    assert code == 0
    assert "complete" in out
    assert len(json.loads((tmp_path / "new/list.json").read_text())["checkpoints"]) == 2


def test_a_reader_that_leaves_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", stream(writer, Outlet("stdout", give_up), None))
    assert main(["list", str(run)]) == 141
    os.close(writer)


def test_names_cannot_disturb_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().line("step\x1b[31m\rred [bold]ä")
    Terminal().table(["name:"], [("a\x1b[2Jb",)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "step\\x1b[31m\\rred [bold]ä\n" in out
    assert "a\\x1b[2Jb" in out
