"""Stores merged, listed and split are those that one preparation would have written, byte for byte."""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_tools_prepare_data import names

from megalite.data.joined_store import JoinedStore, open_store
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite_tools import commands
from megalite_tools.data.merge_data import main as merge
from megalite_tools.data.prepare_data import main as prepare
from megalite_tools.data.split_data import main as split

SUFFIXES = (".bin", ".idx", ".json")
DOCUMENTS = 300
PARTS = (0, 120, 121, DOCUMENTS)  # where the documents of each part begin
Prepare = Callable[..., None]


def same(one: Path, other: Path, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Whether two stores have the same files with the same bytes."""
    left, right = ([path.name for path in each.parent.glob(f"{each.name}.*")] for each in (one, other))
    assert len(left) == len(right) == len(suffixes)
    return all(Path(f"{one}{suffix}").read_bytes() == Path(f"{other}{suffix}").read_bytes() for suffix in suffixes)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A folder with texts in three files and a store of each."""
    folder = tmp_path_factory.mktemp("once")
    lines = [json.dumps({"text": f"document {at} says " + "hello " * (at % 7)}) + "\n" for at in range(DOCUMENTS)]
    for number, (first, last) in enumerate(pairwise(PARTS)):
        text = folder / f"{number}.jsonl"
        text.write_text("".join(lines[first:last]))
        arguments = ["--tokenizer", str(tokenizer_file), "--workers", "1", "--out", str(folder / f"part{number}")]
        assert prepare([str(text), *arguments]) == 0
    return folder


@pytest.fixture
def parts(out: Path, once: Path) -> list[str]:
    """The three stores, copied to `out`."""
    for path in once.glob("part*"):
        shutil.copy(path, out)
    return [str(out / f"part{number}") for number in range(3)]


@pytest.fixture
def prepared(out: Path, once: Path, tokenizer_file: Path) -> Prepare:
    """Prepares all texts as one store of a name, with some options."""

    def call(name: str, *options: str) -> None:
        texts = [str(once / f"{number}.jsonl") for number in range(3)]
        arguments = ["--tokenizer", str(tokenizer_file), "--workers", "1", "--out", str(out / name)]
        assert prepare([*texts, *arguments, *options]) == 0

    return call


def test_a_merge_is_what_one_preparation_writes(out: Path, parts: list[str], prepared: Prepare) -> None:
    prepared("whole")
    assert merge([str(out / "merged"), *parts]) == 0
    assert same(out / "merged", out / "whole")
    assert merge([str(out / "list"), *parts, "--list"]) == 0
    assert merge([str(out / "of_list"), str(out / "list")]) == 0
    assert same(out / "of_list", out / "whole")
    assert merge([str(out / "other"), *reversed(parts)]) == 0
    assert not same(out / "other", out / "whole")


def test_a_merge_is_packed_as_one_preparation_packs(
    out: Path, parts: list[str], prepared: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared("whole", "--pack", "70")
    assert merge([str(out / "merged"), *parts, "--pack", "70"]) == 0
    assert same(out / "merged", out / "whole", (*SUFFIXES, ".mask"))
    assert merge([str(out / "copy"), str(out / "merged")]) == 0
    assert same(out / "copy", out / "whole", (*SUFFIXES, ".mask"))
    capsys.readouterr()
    for program, arguments in (
        (merge, ["--pack", "70"]),
        (split, ["--valid-documents", "1"]),
    ):
        assert program([str(out / "again"), str(out / "merged"), *arguments]) == 2
        assert "merged: is packed, and some documents of it alone would not be" in capsys.readouterr().err
    assert merge([str(out / "again"), str(out / "merged"), parts[0]]) == 2
    assert "merged: is packed, with one token more" in capsys.readouterr().err
    assert merge([str(out / "short"), *parts, "--pack", "8"]) == 2
    assert "document longer than a sequence" in capsys.readouterr().err
    assert not list(out.glob("again*")) + list(out.glob("*short*"))
    assert merge([str(out / "short"), *parts, "--pack", "36", "--on-error", "skip"]) == 0
    assert "× document longer than a sequence, first" in capsys.readouterr().out


def test_a_split_is_what_one_preparation_writes(
    out: Path, parts: list[str], prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.data.store_writer.COPIED_DOCUMENTS", 7)
    monkeypatch.setattr("megalite.data.store_writer.COPIED_TOKENS", 5)
    prepared("whole", "--valid-fraction", "0.2", "--seed", "3")
    assert split([str(out / "split"), *parts, "--valid-fraction", "0.2", "--seed", "3"]) == 0
    for name in ("_train", "_valid"):
        assert same(out / f"split{name}", out / f"whole{name}")
    count = open_store(out / "split_valid").documents
    assert split([str(out / "exact"), *parts, "--valid-documents", str(count), "--seed", "3"]) == 0
    assert same(out / "exact_valid", out / "split_valid")


def test_masks_are_merged_and_split(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.store_writer.COPIED_TOKENS", 5)
    random = np.random.default_rng(0)
    stores = [tmp_path / "a", tmp_path / "b"]
    for prefix in stores:
        with StoreWriter(prefix, "uint16", masked=True) as writer:
            for _ in range(30):
                tokens = random.integers(100, size=random.integers(0, 9))
                writer.add(tokens, tokens % 2 > 0)
    assert merge([str(out / "merged"), *map(str, stores)]) == 0
    joined, merged = JoinedStore("both", [*map(TokenStore, stores)]), TokenStore(out / "merged")
    assert merged.fingerprint() == joined.fingerprint()
    assert split([str(out / "split"), *map(str, stores), "--valid-documents", "20"]) == 0
    train, valid = TokenStore(out / "split_train"), TokenStore(out / "split_valid")
    assert (train.documents, valid.documents) == (40, 20)
    found = [
        (each.document(at).tolist(), each.trained(*_stretch(each, at)).tolist())
        for each in (train, valid)
        for at in range(each.documents)
    ]
    expected = [
        (merged.document(at).tolist(), merged.trained(*_stretch(merged, at)).tolist()) for at in range(merged.documents)
    ]
    assert sorted(found) == sorted(expected)


def _stretch(store: TokenStore, document: int) -> tuple[int, int]:
    start, end = store.bounds(document)
    return start, end - start


def test_as_many_documents_as_asked_are_held_out_by_seed(out: Path, parts: list[str]) -> None:
    held = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert split([str(out / name), *parts, "--valid-documents", "17", "--seed", seed]) == 0
        train, valid = (open_store(out / f"{name}{each}") for each in ("_train", "_valid"))
        assert (train.documents, valid.documents) == (283, 17)
        held.append(valid.read(0, valid.tokens).tolist())
    assert held[0] == held[1] != held[2]
    assert split([str(out / "more"), *parts, "--valid-documents", "18"]) == 0
    more = open_store(out / "more_valid")
    documents = [more.document(at).tolist() for at in range(18)]
    fewer = open_store(out / "a_valid")
    assert all(fewer.document(at).tolist() in documents for at in range(17))


def test_a_store_that_tells_less_is_merged_without_a_description_of_its_own(out: Path, parts: list[str]) -> None:
    for part in parts[:2]:
        Path(f"{part}.json").unlink()
    assert merge([str(out / "merged"), *parts[:2]]) == 0
    described = json.loads((out / "merged.json").read_text())
    assert (described["documents"], described["tokenizer"], described["sources"]) == (121, None, [])


def test_sources_that_are_not_listed_are_counted(out: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    stores = []
    for half in ("a", "b"):
        (tmp_path / half).mkdir()
        for number in range(60):
            (tmp_path / half / f"{number}.txt").write_text("text")
        stores.append(str(out / half))
        arguments = ["--tokenizer", str(tokenizer_file), "--workers", "1", "--out"]
        assert prepare([str(tmp_path / half), *arguments, stores[-1]]) == 0
    assert prepare([str(tmp_path / "a"), str(tmp_path / "b"), *arguments, str(out / "whole")]) == 0
    assert merge([str(out / "merged"), *stores]) == 0
    assert same(out / "merged", out / "whole")
    assert merge([str(out / "copy"), str(out / "merged")]) == 0
    assert same(out / "copy", out / "whole")


BAD: list[tuple[Callable[[list[str]], int], list[str], str]] = [
    (merge, ["{out}/", "{0}"], "ends with a slash; add the name of the store"),
    (merge, ["s3://bucket/new", "{0}"], "OUT s3://bucket/new: stores are written to this machine"),
    (merge, ["{out}/new", "{0}", "{1}", "{0}"], "part0: is an input twice"),
    (merge, ["{out}/new", "{0}", "{out}/lost"], "lost.idx: no such file"),
    (merge, ["{0}", "{1}"], "part0.bin: exists already"),
    (merge, ["{0}", "{1}", "--list"], "part0.bin: exists already"),
    (merge, ["{out}/new", "{0}", "--pack", "1"], "--pack 1: needs 2 or more tokens"),
    (merge, ["{out}/new", "{0}", "--pack", "70", "--list"], "--list and --pack cannot be used together"),
    (split, ["{out}/new", "{0}", "--valid-fraction", "1"], "--valid-fraction 1.0: must be above 0 and below 1"),
    (split, ["{out}/new", "{0}", "--valid-fraction", "nan"], "--valid-fraction nan"),
    (split, ["{out}/new", "{0}", "--valid-fraction", "0.999999"], "all 120 documents fell to validation"),
    (split, ["{out}/new", "{0}", "--valid-documents", "120"], "must be above 0 and below the 120 of the input"),
    (split, ["{out}/new", "{0}", "--valid-documents", "0"], "--valid-documents 0: must be above 0"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2])
def test_bad_input_leaves_nothing(
    out: Path,
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    case: tuple[Callable[[list[str]], int], list[str], str],
) -> None:
    program, arguments, told = case
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert program([argument.format(*parts, out=out) for argument in arguments]) == 2
    assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("program", [merge, split])
def test_a_disk_that_fills_up_leaves_nothing(
    out: Path, parts: list[str], capsys: pytest.CaptureFixture[str], program: Callable[[list[str]], int]
) -> None:
    before = names(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        arguments = ["--valid-fraction", "0.5"] if program is split else []
        assert program([str(out / "new"), *parts, *arguments]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ": cannot write the store: File too large" in capsys.readouterr().err
    assert names(out) == before


@pytest.mark.parametrize("name", ["merge_data", "split_data", "dedup_data"])
def test_a_signal_leaves_nothing(
    out: Path, parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = names(out)
    seen: list[str] = []

    def interrupted(*arguments: object) -> None:
        seen.extend(names(out))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StoreWriter, "copy", interrupted)
    options = {"split_data": ["--valid-documents", "9"], "dedup_data": ["--workers", "1"]}.get(name, [])
    arguments = [str(out / "new"), *parts, *options]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    assert getattr(commands, name)() == 3
    assert capsys.readouterr().err.splitlines()[-1] == f"megalite-{name.replace('_', '-')}: stopped by SIGTERM"
    assert [each for each in seen if ".partial." in each]
    assert names(out) == before


def test_a_damaged_index_is_told_before_anything_is_written(
    out: Path, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(out)
    with Path(f"{parts[2]}.idx").open("r+b") as file:
        file.seek(34)
        file.write(b"\xff\xff\xff\xff")
    assert merge([str(out / "new"), *parts]) == 2
    assert "part2.idx: found length -1 of sequence 0" in capsys.readouterr().err
    assert names(out) == before
