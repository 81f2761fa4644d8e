import bz2
import gzip
import io
import json
import lzma
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite_tools.data.documents import (
    Document,
    Reading,
    Reject,
    Skipped,
    _between,
    read_documents,
)
from megalite_tools.data.inputs import InputFile, find_inputs, read_texts
from megalite_tools.data.opened import check_encoding

TEXTS = ["first\n", "sécond ☃\r\n", "third"]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def gz(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)  # workers must agree on parameters


def zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def in_two(compress: Callable[[bytes], bytes]) -> bytes:
    """Two compressed members or frames, one after the other, cut inside a line."""
    return compress(LINES[:20]) + compress(LINES[20:])


def file_at(path: Path) -> InputFile:
    return InputFile(path, path.stat().st_size)


def texts(path: Path, key: str = "text", **reading: object) -> list[str]:
    return list(read_texts([file_at(path)], Reading(key, **reading), "stop", Skipped()))  # type: ignore[arg-type]


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
        (
            "d.jsonl",
            b"1" * 5000,
            "d.jsonl:1: not valid JSON: Exceeds the limit (4300 digits) for integer string conver",
        ),
        ("d.jsonl", b'["text"]\n', "d.jsonl:1: not a JSON object: list"),
        ("d.jsonl", b'{"body": "a", "id": 1}\n', "d.jsonl:1: no field 'text': the fields are body, id"),
        ("d.jsonl", b'{"text": null}\n', "d.jsonl:1: field 'text' is not a string: NoneType"),
        ("d.jsonl", b'{"text": "\\ud800"}\n', "d.jsonl:1: not valid Unicode: lone surrogate '\\ud800'"),
        ("d.jsonl.gz", gz(LINES)[:-9], "d.jsonl.gz: unreadable file"),
        ("d.jsonl.gz", b"not gzip", "d.jsonl.gz: unreadable file"),
        ("d.jsonl.zst", zstd(LINES)[:-4], "d.jsonl.zst: unreadable file: the compressed file is truncated"),
        ("d.jsonl.zst", zstd(LINES) + zstd(LINES)[:5], "d.jsonl.zst: unreadable file: the compressed file is trunc"),
        ("d.jsonl.zst", b"not zstd", "d.jsonl.zst: unreadable file"),
        ("d.jsonl.zst", b"", "d.jsonl.zst: unreadable file: the compressed file is truncated: it has no bytes"),
        ("d.txt.gz", b"", "d.txt.gz: unreadable file: the compressed file is truncated: it has no bytes"),
        ("d.parquet", b"not parquet", "d.parquet: unreadable file"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(caught.value)
    assert "sys." not in str(caught.value)
    rejects = [item for item in read_documents(path, Reading()) if not isinstance(item, Document)]
    skipped = Skipped()
    kept = list(read_texts([file_at(path)], Reading(), "skip", skipped))
    assert skipped.counts.total() == len(rejects) > 0
    assert "first " + rejects[0].origin in skipped.lines()[0]
    assert len(kept) == len(list(read_documents(path, Reading()))) - len(rejects)


def test_parquet_without_the_text(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(parquet(tmp_path, text=["a", None], n=[1, 2]))
    with pytest.raises(InputError, match=r"d\.parquet:2: field 'text' is not a string: NoneType"):
        texts(path)
    with pytest.raises(InputError, match=r"d\.parquet: no field 'body': the fields are text, n"):
        texts(path, "body")


def test_parquet_whose_column_is_not_text_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    far = pyarrow.array([2**62], pyarrow.timestamp("us"))  # no datetime of Python
    twice = pyarrow.StructArray.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"])
    within = pyarrow.StructArray.from_arrays([pyarrow.array(["inside"]), far], ["text", "time"])
    columns = {
        "time": (far, r"its type is timestamp\[us\]"),
        "wait": (pyarrow.array([2**62], pyarrow.duration("ns")), r"its type is duration\[ns\]"),
        "list": (pyarrow.array([["a"]]), "its type is list<"),
        "struct": (within, "its type is struct<"),
        "twice.text": (twice, "there are 2 of 'text'"),
        "struct.time": (within, r"its type is timestamp\[us\]"),
    }
    for key, (column, message) in columns.items():
        pyarrow.parquet.write_table(pyarrow.table({key.partition(".")[0]: column}), path)
        with pytest.raises(InputError, match=rf"d\.parquet: field '{key}' is not a string: {message}"):
            texts(path, key)
    assert texts(path, "struct.text") == ["inside"]


def test_parquet_with_text_of_few_values(tmp_path: Path) -> None:
    """Dictionaries, and names that are not UTF-8."""
    path = tmp_path / "d\udcff.parquet"
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    with path.open("wb") as file:
        pyarrow.parquet.write_table(table, file)
    assert texts(path) == ["a", "b", "a"]


def test_lines_and_separators_cut_text(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nthree <|end|> four<|end|>\n")
    skipped = Skipped()
    assert list(read_texts([file_at(path)], Reading(separator="\n"), "stop", skipped)) == [
        "one",
        "two",
        "three <|end|> four<|end|>",
    ]
    assert skipped.lines() == [f"1 × empty document, first {path}:3"]
    assert texts(path, separator="<|end|>") == ["one\r\ntwo\n\nthree ", " four"]
    path.write_bytes("ä \xff".encode("latin-1") + b"\nb\n")
    with pytest.raises(InputError, match=r"d\.txt:1: not valid UTF-8: byte 0xe4"):
        texts(path, separator="\n")
    assert list(read_texts([file_at(path)], Reading(separator="\n"), "skip", Skipped())) == ["b"]


@given(st.lists(st.text("ab<|>\n", max_size=6), max_size=8), st.sampled_from(["\n", "<|", "aab"]), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_what_is_between_separators_is_what_split_finds(parts: list[str], separator: str, block: int) -> None:
    raw = separator.join(parts).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite_tools.data.documents.BLOCK", block)
        found = list(_between(io.BytesIO(raw), separator.encode(), 5))
    expected = raw.split(separator.encode())
    if not expected[-1]:
        expected.pop()
    assert found == [part if len(part) <= 5 else None for part in expected]


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "UTF8", "cp1252"])
def test_other_encodings(tmp_path: Path, name: str, encoding: str) -> None:
    text = "naïve\n" * 30_000
    raw = (text if name == "d.txt" else json.dumps({"text": text}, ensure_ascii=False)).encode(encoding)
    (tmp_path / name).write_bytes(gz(raw) if name.endswith(".gz") else raw)
    assert texts(tmp_path / name, encoding=encoding) == [text]


def test_text_in_another_encoding_than_told_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"\xff\xfea\0b")
    with pytest.raises(InputError, match=r"d\.txt: not valid utf-16: .*truncated"):
        texts(tmp_path / "d.txt", encoding="utf-16")
    for name in (
        "utf-9",
        "hex",
        "rot13",
        "base64",
        "undefined",
        "idna",
        "punycode",
        "unicode_escape",
        "utf\0",
        "\udcff",
    ):
        with pytest.raises(InputError, match="--encoding"):
            check_encoding(name)


def test_fields_inside_of_others(tmp_path: Path) -> None:
    record = {"meta": {"text": "inside", "n": 1}, "meta.n": "by its full name"}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert texts(path, "meta.text") == ["inside"]
    assert texts(path, "meta.n") == ["by its full name"]
    for key, message in (("meta.body", "the fields are text, n"), ("meta.text.more", "the fields are none")):
        with pytest.raises(InputError, match=rf"no field '{key}': {message}"):
            texts(path, key)
    table = pyarrow.table({"meta": [{"text": "inside", "n": 1}, None], "raw": [b"bytes \xe2\x98\x83", b"\xff"]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    read = list(read_documents(tmp_path / "d.parquet", Reading("meta.text")))
    assert read[0] == Document("inside")
    assert str(read[1]).endswith("d.parquet:2: field 'meta.text' is not a string: NoneType")
    found = list(read_documents(tmp_path / "d.parquet", Reading("raw")))
    assert found[0] == Document("bytes ☃")
    assert str(found[1]).endswith("d.parquet:2: not valid UTF-8: byte 0xff")


@pytest.mark.parametrize(
    ("name", "compress"), [("d.jsonl.bz2", bz2.compress), ("d.JSONL.XZ", lzma.compress), ("d.Ndjson.GZ", gz)]
)
def test_more_compressions_in_any_case(tmp_path: Path, name: str, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / name).write_bytes(in_two(compress))
    assert texts(tmp_path / name) == TEXTS
    (tmp_path / name).write_bytes(compress(LINES)[:-9])
    with pytest.raises(InputError, match="unreadable file"):
        texts(tmp_path / name)


@pytest.mark.parametrize("name", ["d.jsonl.1", "d.log", "README", "d.jsonl.lz4", "d.gz", ".txt"])
def test_a_suffix_that_says_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gz(LINES) if name == "d.gz" else LINES)
    with pytest.raises(InputError, match=r"--format text, jsonl or parquet says what it is"):
        find_inputs([str(tmp_path / name)], "*", Reading(), "skip", Skipped())
    assert texts(tmp_path / name, format="jsonl") == TEXTS


@pytest.mark.parametrize("form", ["text", "lines", "jsonl", "parquet"])
def test_a_document_above_the_bound_is_refused_by_itself(tmp_path: Path, form: str) -> None:
    long = "x" * 3_000_000
    reading = Reading(most=1000, separator="\n" if form == "lines" else None)
    path = tmp_path / f"d.{'txt' if form in ('text', 'lines') else form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", long, "b"]}), path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", long, "b")))
    else:
        path.write_text(f"a\n{long}\nb")
    skipped = Skipped()
    kept = list(read_texts([file_at(path)], reading, "skip", skipped))
    assert kept == ([] if form == "text" else ["a", "b"])
    assert skipped.lines() == [f"1 × document too long, first {path}{'' if form == 'text' else ':2'}"]
    with pytest.raises(InputError, match=r"more than 1,000 bytes; --lines or --separator cut .* --max-document allows"):
        list(read_texts([file_at(path)], reading, "stop", Skipped()))


@pytest.mark.parametrize(("suffix", "compress"), [(".zst", zstd), (".gz", gz)])
def test_what_compresses_well_does_not_fill_memory(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"d.txt{suffix}"
    path.write_bytes(compress(bytes(100_000_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [type(found) for found in read_documents(path, Reading(most=1000))] == [Reject]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 80_000  # kB


def test_empty_documents_are_always_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": ""}\n{"text": "a"}\n{"text": " \\n"}\n')
    skipped = Skipped()
    assert list(read_texts([file_at(path)], Reading(), "stop", skipped)) == ["a"]
    assert skipped.lines() == [f"2 × empty document, first {path}:1"]


@pytest.mark.parametrize(("name", "module"), [("d.txt.zst", "opened.zstandard"), ("d.parquet", "documents.pyarrow")])
def test_a_missing_optional_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(f"megalite_tools.data.{module}", None)
    with pytest.raises(InputError, match=rf"{module.partition('.')[2]}.*pip install 'megalite\[data\]'"):
        list(read_texts([file_at(tmp_path / name)], Reading(), "skip", Skipped()))
