"""Files that a configuration names, and paths at which the system does not tell what is there."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.base.errors import InputError
from megalite.base.files import UnreachableError, exists, is_file, is_folder, read_object, write_whole
from megalite.config.load import load
from megalite.config.rules.files import validate_files
from megalite.config.rules.validate import check_files, validate
from megalite.config.schema import Config
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter, sweep
from megalite.data.tokenizer import load_tokenizer, tokenizer_hash

LONG = "x" * 300  # no file system has such a name


def test_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    names = ("file", ".", "nowhere", "link", "file/inside")
    looks = [[look(tmp_path / name) for look in (exists, is_file, is_folder)] for name in names]
    assert looks == [[True, True, False], [True, False, True], *[[False] * 3] * 3]
    assert exists(tmp_path / "link", follow=False)
    assert not is_folder(tmp_path / "link", follow=False)


@pytest.mark.parametrize("look", [exists, is_file, is_folder])
def test_what_the_system_does_not_tell_is_bad_input(look: Callable[[Path], bool], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnreachableError, match=r"cannot be looked at: File name too long; use a shorter name"):
        look(tmp_path / LONG)
    with pytest.raises(UnreachableError, match=r"loop: cannot be looked at: Too many .*; fix the link"):
        look(tmp_path / "loop")
    with pytest.raises(UnreachableError, match=r"is no path: embedded null byte") as caught:
        look(tmp_path / "a\0b")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - ours


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_folder_that_lets_nobody_in_is_told(tmp_path: Path) -> None:
    script = "import os, sys\nfrom megalite.base.files import is_file\nos.setuid(65534)\nis_file(sys.argv[1])"
    (tmp_path / "shut").mkdir(mode=0o700)
    command = [sys.executable, "-c", script, str(tmp_path / "shut/file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Permission denied; let this user into the folders that lead there" in done.stderr


def test_every_path_of_a_configuration_is_told_with_its_key(tmp_path: Path) -> None:
    long, resume = str(tmp_path / LONG), "checkpoint.resume"
    single = ("data.tokenizer", resume, "checkpoint.weights")
    overrides = [f"{key}={long}" for key in single] + [f"data.{name}=[{{path: {long}}}]" for name in ("train", "valid")]
    problems = validate_files(load([], [*overrides, f"parallel.pipeline.schedule={long}.yaml"]))
    assert {problem.rule for problem in problems} == {"cannot be looked at: File name too long"}
    assert len(problems) == 6
    assert {problem.fix for problem in problems} == {"use a shorter name"}


@pytest.mark.parametrize(
    "use",
    [
        TokenStore,
        lambda path: load_tokenizer(f"{path}.model"),
        tokenizer_hash,
        sweep,
        lambda path: StoreWriter(path, "uint16").__enter__(),
        lambda path: read_object(Path(path), 10),
        lambda path: write_whole(Path(path), ""),
        lambda path: load([path]),
        lambda path: load([f"{path}=1.yaml"]),
    ],
)
def test_whatever_opens_a_path_refuses_one_that_cannot_be(use: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{LONG}.*: .*File name too long"):
        use(str(tmp_path / LONG))


def test_a_file_includes_none_that_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"include: {LONG}.yaml")
    with pytest.raises(InputError, match=r"File name too long \(included by .*a.yaml\)"):
        load([str(tmp_path / "a.yaml")])


def test_files_are_looked_for_beside_the_rules(tmp_path: Path) -> None:
    (tmp_path / "there.bin").touch()
    (tmp_path / "there.idx").touch()
    (tmp_path / "half.bin").touch()
    for name in ("half", "list"):
        (tmp_path / f"{name}.shards").touch()
    there, half, listed = tmp_path / "there", tmp_path / "half", tmp_path / "list"
    good = load([], [f"data.train=[{{path: {there}}}]", f"data.valid=[{{path: {listed}}}]", "eval.steps=1"])
    assert validate_files(good) == []
    bad = load(
        [],
        [
            f"data.train=[{{path: {half}}}, {{path: {there}.bin}}, {{path: {listed}.shards}}, {{path: ftp://host/store}}]",
            "eval.steps=1",
            f"data.tokenizer={tmp_path / 'none.model'}",
            f"checkpoint.resume={tmp_path / 'none'}",
        ],
    )
    assert validate(bad) == []
    with pytest.raises(InputError) as caught:
        check_files(bad)
    assert [str(problem) for problem in caught.value.problems] == [
        f'data.train[0].path = "{half}": no such file: {half}.idx; '
        "correct the path, or make it with megalite-prepare-data",
        f'data.train[1].path = "{there}.bin": no such file: {there}.bin.bin and {there}.bin.idx; leave out the .bin',
        f'data.train[2].path = "{listed}.shards": no such file: {listed}.shards.bin and {listed}.shards.idx; '
        "leave out the .shards",
        'data.train[3].path = "ftp://host/store": is no URL that can be read, which begins with s3, gs, https, http; '
        "copy the store to a server with one of these, or to a disk",
        "eval.steps = 1: evaluation needs data.valid; list token stores there, or use 0",
        f'data.tokenizer = "{tmp_path}/none.model": no such file; correct the path, or use null',
        f'checkpoint.resume = "{tmp_path}/none": no such checkpoint; use auto, never or the path of a checkpoint',
    ]


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("none", None),
        ("linked", None),
        ("lost", "{0}.mask, which {0}.json speaks of, is not there"),
        ("short", "{0}.mask has 1 bytes, not the 2 of 9 tokens"),
        ("dangling", "{0}.mask is no regular file, nor a link to one"),
        ("folder", "{0}.mask is no regular file, nor a link to one"),
        ("no description", None),
    ],
)
def test_a_mask_is_there_and_as_long_as_its_store(fault: str, rule: str | None, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", "uint16", masked=True) as writer:
        writer.add([1] * 9, [True] * 9)
    mask, path = tmp_path / "store.mask", str(tmp_path / "store")
    content = mask.read_bytes()
    mask.unlink()
    match fault:
        case "none":
            mask.write_bytes(content)
        case "linked":
            (tmp_path / "kept").write_bytes(content)
            mask.symlink_to("kept")
        case "short":
            mask.write_bytes(content[:1])
        case "dangling":
            mask.symlink_to("nowhere")
        case "folder":
            mask.mkdir()
        case "no description":
            (tmp_path / "store.json").unlink()
    problems = validate_files(load([], [f"data.train=[{{path: {path}}}]"]))
    if rule is None:
        assert problems == []
    else:
        (problem,) = problems
        assert (problem.key, problem.rule) == ("data.train[0].path", rule.format(path))


def test_training_needs_data() -> None:
    assert [problem.key for problem in validate_files(Config())] == ["data.train"]


def test_sources_on_servers_need_their_package_and_a_timeout_below_that_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load([], ["data.train=[{path: 's3://bucket/a'}, {path: 'https://me:pw@host/b?c'}]", "train.timeout=300"])
    told = [f"{problem.key}: {problem.rule}" for problem in validate(config)]
    assert told == [
        "data.remote.timeout: must be below train.timeout = 300, which ends a job that waits as long for its data",
        "data.train[1].path: must have no query, fragment or password: it is the prefix of several URLs, "
        "and stands in records",
    ]
    assert validate_files(config) == []
    monkeypatch.setattr("megalite.config.rules.files.find_spec", lambda package: None)
    assert [str(problem.fix) for problem in validate_files(config)] == [
        "pip install 'megalite[s3]', or copy the store to a disk",
        "pip install 'megalite[http]', or copy the store to a disk",
    ]
