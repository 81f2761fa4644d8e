"""What a run folder keeps of every start."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import pytest

import megalite
from megalite.base.errors import InputError
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.weights.formats.tokenizer import kept_tokenizer
from megalite.config.load import load
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Config, Data, Source, Train
from megalite.train.folder import starts
from megalite.train.folder.starts import keep_tokenizer, record_start

CONFIG = Config(parallel=Parallel(pp=2, dp_shard=3), data=Data(train=[Source("a${b}", 2.0)]))
DEVICES = [("east", "H100"), ("east", "H100"), ("west", "A100")]


def record(folder: Path, config: Config = CONFIG, progress: Progress | None = None) -> dict[str, object]:
    path = record_start(folder, config, DEVICES, progress or Progress())
    return json.loads(path.read_text())


def test_a_start_tells_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    found = record(tmp_path)
    assert (found["ranks"], found["devices"]) == (3, {"east": {"H100": 2}, "west": {"A100": 1}})
    assert found["layout"] == asdict(CONFIG.parallel.layout)
    assert (found["command"], found["working_directory"]) == (sys.orig_argv, os.getcwd())
    assert found["environment"]["SLURM_JOB_ID"] == "12"  # type: ignore[index]
    versions = {"torch": version("torch"), "megalite": megalite.__version__}
    assert versions.items() <= found["packages"].items()  # type: ignore[attr-defined]
    written = (tmp_path / "starts/001.yaml").read_bytes()
    assert found["configuration_hash"] == hashlib.sha256(written).hexdigest()
    assert load([str(tmp_path / "starts/001.yaml")]) == load([str(tmp_path / "config.yaml")]) == CONFIG


@pytest.mark.parametrize("name", ["starts/001.yaml", "config.yaml"])
def test_a_configuration_is_kept_whole_and_in_utf_8(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up leaves no half of it."""
    config = replace(CONFIG, data=Data(train=[Source("Füße/日本", 1.0)]))
    monkeypatch.setattr(starts, "SOURCE", tmp_path)
    record(tmp_path, config)
    assert "Füße/日本" in (tmp_path / name).read_bytes().decode()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match=r"002\.yaml: cannot be written: No space left"):
        record(tmp_path, config)
    assert sorted(path.name for path in (tmp_path / "starts").iterdir()) == ["001.json", "001.yaml", "002.json"]


def test_a_later_start_overwrites_nothing(tmp_path: Path) -> None:
    record(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = record(tmp_path, replace(CONFIG, train=Train(steps=7)), Progress(step=5))
    assert found["resumed"] == {"step": 5, "from": str(tmp_path / "checkpoints/step-00000005")}
    assert {path: path.read_bytes() for path in before} == before
    assert load([str(tmp_path / "starts/002.yaml")]).train.steps == 7


def test_what_the_code_changed_since_its_commit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "megalite").mkdir(parents=True)
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    (source / "megalite/code.py").write_text("before = 1\n")
    (source / "notes").write_text("private\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(starts, "SOURCE", source)
    assert len(str(record(tmp_path)["commit"])) == 40
    (source / "megalite/code.py").write_text("after = 1\n")
    (source / "notes").write_text("more private\n")
    assert str(record(tmp_path)["commit"]).endswith("-dirty")
    changes = (tmp_path / "starts/002.diff").read_text()
    assert "-before = 1\n+after = 1\n" in changes
    assert "private" not in changes
    monkeypatch.setattr(starts, "DIFF_LIMIT", 20)
    record(tmp_path)
    assert (tmp_path / "starts/003.diff").read_text().endswith(f"cut off here: {len(changes)} bytes in all\n")
    monkeypatch.setattr(starts, "SOURCE", tmp_path)
    assert record(tmp_path)["commit"] is None
    assert sorted(path.name for path in (tmp_path / "starts").glob("*.diff")) == ["002.diff", "003.diff"]


def test_a_tokenizer_is_copied_once_and_another_beside_it(tmp_path: Path) -> None:
    given, run = tmp_path / "given", tmp_path / "run"
    given.mkdir()
    (given / "tokenizer.json").write_text("one")
    (given / "tokenizer_config.json").write_text("settings")
    config = replace(CONFIG, data=Data(tokenizer=str(given / "tokenizer.json")))
    assert kept_tokenizer(run) is None
    first = record(run, config)
    assert first["tokenizer"] == {
        "path": str(given / "tokenizer.json"),
        "hash": hashlib.sha256(b"one").hexdigest(),
    }
    record(run, config)
    assert kept_tokenizer(run) == run / "tokenizer/tokenizer.json"
    assert (run / "tokenizer/tokenizer_config.json").read_text() == "settings"
    (given / "tokenizer.json").write_text("two")
    record(run, config)
    assert kept_tokenizer(run) == run / "starts/003.tokenizer/tokenizer.json"
    assert (run / "tokenizer/tokenizer.json").read_text() == "one"
    (given / "tokenizer.json").write_text("one")
    keep_tokenizer(given / "tokenizer.json", run, run / "starts/1000.tokenizer")
    assert kept_tokenizer(run) == run / "starts/1000.tokenizer/tokenizer.json"


def test_nothing_is_written_through_what_somebody_has_prepared(tmp_path: Path) -> None:
    victim, tokenizer, run = tmp_path / "victim", tmp_path / "given/tokenizer.model", tmp_path / "run"
    for folder in (tokenizer.parent, run / "tokenizer", run / "starts"):
        folder.mkdir(parents=True)
    victim.write_text("of somebody else")
    tokenizer.write_text("pieces")
    (run / "tokenizer/tokenizer.model.partial").symlink_to(victim)
    (run / "starts/001.json").symlink_to(victim)
    keep_tokenizer(tokenizer, run, run / "later")
    record(run)
    assert (victim.read_text(), (run / "tokenizer/tokenizer.model").read_text()) == ("of somebody else", "pieces")
    assert (run / "starts/002.json").exists()


def test_a_tokenizer_may_be_a_link_and_its_settings_may_not(tmp_path: Path) -> None:
    """The user has named the one; the others might lead anywhere."""
    given, stored, run = tmp_path / "given", tmp_path / "stored", tmp_path / "run"
    for folder in (given, stored, run):
        folder.mkdir()
    (stored / "tokenizer.json").write_text("{}")
    (given / "tokenizer.json").symlink_to(stored / "tokenizer.json")
    keep_tokenizer(given / "tokenizer.json", run, run / "later")
    assert (run / "tokenizer/tokenizer.json").read_text() == "{}"
    (given / "tokenizer_config.json").symlink_to(stored / "tokenizer.json")
    with pytest.raises(InputError, match="outside of its folder"):
        keep_tokenizer(given / "tokenizer.json", tmp_path / "other", tmp_path / "later")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_settings_of_a_tokenizer_are_neither_waited_for_nor_endless(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}: is no regular file, and is not copied"):
        keep_tokenizer(tmp_path / "tokenizer.json", tmp_path / "run", tmp_path / "later")
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=f"{name}: is larger than 16,777,216 bytes"):
        keep_tokenizer(tmp_path / "tokenizer.json", tmp_path / "other", tmp_path / "later")


def test_a_record_is_for_its_owner_and_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_EXPORT_ENV", "ALL,WANDB_API_KEY=precious,A=1")
    monkeypatch.setattr(sys, "orig_argv", ["megalite", "train", "--password", "precious"])
    record(tmp_path)
    text = (tmp_path / "starts/001.json").read_text()
    assert ("precious" in text, '"ALL,WANDB_API_KEY=***,A=1"' in text) == (False, True)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.*")} == {0o600}
