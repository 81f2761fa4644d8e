"""Which files are found, in which order, and how far reading them is."""

import argparse
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megalite.base.errors import InputError
from megalite_tools.data.documents import Reading, Skipped
from megalite_tools.data.inputs import InputFile, add_reading_options, find_inputs, read_texts, reading_of

LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("first\n", "second", "third")).encode()


def test_a_separator_that_is_not_utf8_is_refused() -> None:
    parser = argparse.ArgumentParser()
    add_reading_options(parser)
    with pytest.raises(InputError, match=r"--separator 'a\\udcff' is not valid UTF-8"):
        reading_of(parser.parse_args(["d.txt"]), "a\udcff")
    assert reading_of(parser.parse_args(["d.txt"]), "☃").separator == "☃"


def test_bytes_read_come_to_the_size_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 50_000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES * 1000))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES * 1000)[:100])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row"] * 500}), tmp_path / "d.parquet")
    files = [InputFile(path, path.stat().st_size) for path in sorted(tmp_path.iterdir())]
    told: list[int] = []
    assert len(list(read_texts(files, Reading(), "skip", Skipped(), told.append))) > 3500
    assert sum(told) == sum(file.bytes for file in files)
    assert len([count for count in told if count]) > 8


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_another_name_of_a_file_is_told_or_skipped(tmp_path: Path, link: str) -> None:
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_text("text")
    getattr(other, link)(file)
    with pytest.raises(InputError, match=rf"b\.txt: given twice: it is {file}, .*--on-error skip"):
        find_inputs([str(tmp_path)], "*.txt", Reading(), "stop", Skipped())
    skipped = Skipped()
    assert find_inputs([str(tmp_path)], "*.txt", Reading(), "skip", skipped) == [InputFile(file, 4)]
    assert skipped.lines() == [f"1 × given twice, first {other}"]


def test_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.txt", "b/deep/m.txt", "b/x.md", "a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_inputs([str(tmp_path / "b"), str(tmp_path / "a.md")], "**/*.txt", Reading(), "stop", Skipped())
    assert [str(each.path.relative_to(tmp_path)) for each in found] == ["b/a.txt", "b/deep/m.txt", "b/z.txt", "a.md"]


def test_a_directory_stands_for_all_files_of_known_formats(tmp_path: Path) -> None:
    for name in ("b.jsonl.gz", "a.TXT", "deep/c.parquet", ".hidden.txt", ".git/d.txt", "notes.log", "data.lz4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    skipped = Skipped()
    found = find_inputs([str(tmp_path)], None, Reading(), "stop", skipped)
    assert [str(each.path.relative_to(tmp_path)) for each in found] == ["a.TXT", "b.jsonl.gz", "deep/c.parquet"]
    assert skipped.lines() == [f"2 × unknown format, first {tmp_path}/data.lz4"]
    assert len(find_inputs([str(tmp_path)], None, Reading(format="text"), "stop", Skipped())) == 5
    for name in ("", "deep.txt"):  # empty, or with nothing of a known format
        (tmp_path / "other" / name).mkdir(parents=True)
    with pytest.raises(InputError, match="other: no file in this directory has a suffix that tells of a format"):
        find_inputs([str(tmp_path / "other")], None, Reading(), "stop", Skipped())
    (tmp_path / "other" / "d.parquet.gz").touch()
    with pytest.raises(InputError, match=r"d\.parquet\.gz: Parquet files have a compression of their own"):
        find_inputs([str(tmp_path / "other")], None, Reading(), "stop", Skipped())


def test_what_is_no_regular_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.txt")
    for name in (str(tmp_path / "fifo.txt"), "/dev/zero"):
        with pytest.raises(InputError, match="not a regular file"):
            find_inputs([name], None, Reading(format="text"), "stop", Skipped())


@pytest.mark.parametrize(
    ("inputs", "pattern", "message"),
    [
        (["here", "here/a.txt"], "*.txt", r"here/a\.txt: given twice"),
        (["gone.txt"], "*", r"gone\.txt: no such file or directory"),
        (["here"], "*.md", r"here: no file in this directory matches --glob '\*\.md'"),
        (["here"], "/a*", "--glob '/a"),
        (["here"], "", "--glob ''"),
    ],
)
def test_bad_inputs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], pattern: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.txt").touch()
    with pytest.raises(InputError, match=message):
        find_inputs(inputs, pattern, Reading(), "stop", Skipped())
