import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megalite.config.errors import InputError
from megalite_tools.documents import Document, Reading, Skipped, find_files, read_documents, read_texts

TEXTS = ["first\n", "sécond ☃\r\n", "third"]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def gz(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)  # workers must agree on parameters


def zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def in_two(compress: Callable[[bytes], bytes]) -> bytes:
    """Two compressed members or frames, one after the other, cut inside a line."""
    return compress(LINES[:20]) + compress(LINES[20:])


def texts(path: Path, key: str = "text", **reading: object) -> list[str]:
    return list(read_texts([path], Reading(key, **reading), "stop", Skipped()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", LINES),
        ("d.jsonl", b"\xef\xbb\xbf" + LINES.rstrip(b"\n")),
        ("d.json", LINES.replace(b"\n", b"\n\n")),
        ("d.ndjson.gz", gz(LINES)),
        ("d.jsonl.gz", in_two(gz)),
        ("d.jsonl.zst", zstd(LINES)),
        ("d.v2.jsonl.zstd", in_two(zstd)),
    ],
)
def test_json_lines(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == TEXTS


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_zstd_of_any_size(tmp_path: Path, size: int) -> None:
    text = "".join(chr(97 + i * i % 23) for i in range(size))
    (tmp_path / "d.txt.zst").write_bytes(zstd(text.encode()))
    assert texts(tmp_path / "d.txt.zst") == [text]


@pytest.mark.parametrize("string", [pyarrow.string(), pyarrow.large_string()])
def test_parquet(tmp_path: Path, string: pyarrow.DataType) -> None:
    table = pyarrow.table({"n": range(3000), "body": pyarrow.array([f"row {i}" for i in range(3000)], string)})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=500)
    assert texts(tmp_path / "d.parquet", "body") == [f"row {i}" for i in range(3000)]


@pytest.mark.parametrize("name", ["d.txt", "d.py", "d.TXT", "d.md.gz", "d.Md.GZ"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    raw = "a\r\n\tb ☃\n\n".encode()
    (tmp_path / name).write_bytes(gz(raw) if name.lower().endswith(".gz") else raw)
    assert texts(tmp_path / name) == [raw.decode()]


def parquet(tmp_path: Path, **columns: list[object]) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "scratch")
    return (tmp_path / "scratch").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.txt", b"one\ntwo \xff", "d.txt:2: not valid UTF-8: byte 0xff"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "d.jsonl:2: not valid UTF-8: byte 0xe9"),
        ("d.jsonl", b'\n{"text": \n', "d.jsonl:2: not valid JSON"),
        ("d.json", b'{\n"text": "pretty-printed"\n}\n', "d.json:1: not valid JSON"),
        ("d.jsonl", b"[" * 100_000, "d.jsonl:1: not valid JSON"),
        ("d.jsonl", b'["text"]\n', "d.jsonl:1: not a JSON object: list"),
        ("d.jsonl", b'{"body": "a", "id": 1}\n', "d.jsonl:1: no field 'text': the fields are body, id"),
        ("d.jsonl", b'{"text": null}\n', "d.jsonl:1: field 'text' is not a string: NoneType"),
        ("d.jsonl", b'{"text": "\\ud800"}\n', "d.jsonl:1: not valid Unicode: lone surrogate '\\ud800'"),
        ("d.jsonl.gz", gz(LINES)[:-9], "d.jsonl.gz: unreadable file"),
        ("d.jsonl.gz", b"not gzip", "d.jsonl.gz: unreadable file"),
        ("d.jsonl.zst", zstd(LINES)[:-4], "d.jsonl.zst: unreadable file: the compressed file is truncated"),
        ("d.jsonl.zst", zstd(LINES) + zstd(LINES)[:5], "d.jsonl.zst: unreadable file: the compressed file is trunc"),
        ("d.jsonl.zst", b"not zstd", "d.jsonl.zst: unreadable file"),
        ("d.parquet", b"not parquet", "d.parquet: unreadable file"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    rejects = [item for item in read_documents(path, Reading()) if not isinstance(item, Document)]
    skipped = Skipped()
    kept = list(read_texts([path], Reading(), "skip", skipped))
    assert skipped.counts.total() == len(rejects) > 0
    assert "first " + rejects[0].origin in skipped.lines()[0]
    assert len(kept) == len(list(read_documents(path, Reading()))) - len(rejects)


def test_parquet_without_the_text(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(parquet(tmp_path, text=["a", None], n=[1, 2]))
    with pytest.raises(InputError, match=r"d\.parquet:2: field 'text' is not a string: NoneType"):
        texts(path)
    with pytest.raises(InputError, match=r"d\.parquet: no field 'body': the columns are text, n"):
        texts(path, "body")


def test_empty_documents_are_always_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": ""}\n{"text": "a"}\n{"text": " \\n"}\n')
    skipped = Skipped()
    assert list(read_texts([path], Reading(), "stop", skipped)) == ["a"]
    assert skipped.lines() == [f"2 × empty document, first {path}:1"]


@pytest.mark.parametrize(("name", "module"), [("d.txt.zst", "opened.zstandard"), ("d.parquet", "documents.pyarrow")])
def test_a_missing_optional_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setattr(f"megalite_tools.{module}", None)
    with pytest.raises(InputError, match=rf"{module.partition('.')[2]}.*pip install megalite\[data\]"):
        list(read_texts([tmp_path / name], Reading(), "skip", Skipped()))


def test_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.txt", "b/deep/m.txt", "b/x.md", "a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_files([str(tmp_path / "b"), str(tmp_path / "a.md")], "**/*.txt", Reading(), "stop", Skipped())
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b/a.txt", "b/deep/m.txt", "b/z.txt", "a.md"]


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
        find_files(inputs, pattern, Reading(), "stop", Skipped())
