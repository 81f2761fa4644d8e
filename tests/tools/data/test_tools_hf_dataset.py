"""Datasets of Hugging Face as inputs: the same stores as of JSON Lines, whole or in shards."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from chat_families import MARKED, write_tokenizer
from test_tools_sharded import command, content, merged_is_one_store

from megalite.base.errors import InputError
from megalite.data.description import Description, SourceFile
from megalite_tools.data import hf_dataset
from megalite_tools.data.documents import Document, Reading, Reject, Skipped
from megalite_tools.data.hf_dataset import find_dataset
from megalite_tools.data.inputs import find_inputs, read_texts
from megalite_tools.data.merge_data import main as merge
from megalite_tools.data.prepare_data import main

datasets = pytest.importorskip("datasets", "5")
TEXTS = [f"row {number} says " + "hello " * (number % 5) for number in range(50)]
LINES = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)]
CALLS = [{"city": "Ulm"}, {"city": "Bonn", "days": 3}, {"days": 2}]
CHATS = [
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ask", "arguments": asked}}]},
        {"role": "tool", "content": "Rain."},
        {"role": "assistant", "content": "It rains."},
    ]
    for asked in CALLS
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reaches the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def table() -> Any:
    return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})


def save(folder: Path) -> str:
    """A folder of two splits, of which `train` has TEXTS in three files."""
    splits = {"train": table(), "test": table().select(range(4))}
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 3, "test": 1})
    return f"hf:{folder}"


def write_lines(folder: Path) -> str:
    """A folder of four files that have TEXTS."""
    folder.mkdir()
    for number, first in enumerate((0, 13, 26, 39)):
        (folder / f"{number}.jsonl").write_text("".join(LINES[first : first + 13]))
    return f"hf:{folder}"


def write_parquet(folder: Path) -> str:
    table().to_parquet(folder / "all.parquet")
    return f"hf:{folder},split=train"


def write_csv(folder: Path) -> str:
    folder.mkdir()
    table().to_csv(folder / "train.csv")
    table().select(range(9)).to_csv(folder / "test.csv")
    return f"hf:{folder},config=default"


@pytest.mark.parametrize("write", [save, write_lines, write_parquet, write_csv])
def test_the_store_is_that_of_the_same_json_lines(
    write: Callable[[Path], str], out: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(LINES))
    named = write(tmp_path / "data")
    for name, given in (("a", str(tmp_path / "lines.jsonl")), ("b", named)):
        assert main(command(given, tokenizer_file, out / name)) == 0
    for suffix in (".bin", ".idx"):
        assert (out / f"a{suffix}").read_bytes() == (out / f"b{suffix}").read_bytes()
    described = Description.read(out / "b")
    assert described is not None
    found = find_dataset(described.sources[0].path)  # the source is an input that names the same content
    assert described.sources == (SourceFile(str(found), found.split_bytes),)
    assert found.split == "train"
    assert found.fingerprint is not None
    assert found.split_bytes == sum(Path(file).stat().st_size for file in found.files) > 0


def test_a_folder_may_have_the_name_of_a_format_and_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("json", "a,b=c")
    for name in names:
        write_lines(Path(name))
    for name in names:
        assert list(read_texts([find_dataset(f"hf:{name}")], Reading(), "stop", Skipped())) == TEXTS


def test_a_split_is_chosen(tmp_path: Path) -> None:
    save(tmp_path / "two")
    named = f"hf:{tmp_path}/two,split=test"
    assert list(read_texts([find_dataset(named)], Reading(), "stop", Skipped())) == TEXTS[:4]
    table().save_to_disk(tmp_path / "one")
    assert find_dataset(f"hf:{tmp_path}/one").split is None
    datasets.DatasetDict(only=table()).save_to_disk(tmp_path / "only")
    assert find_dataset(f"hf:{tmp_path}/only").split == "only"


def test_conversations_have_the_tokens_and_masks_of_json_lines(out: Path, tmp_path: Path) -> None:
    """Other rows' arguments of a call, which are nulls in a table, reach no template."""
    rows = [{"messages": chat} for chat in CHATS]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data/chats.parquet")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", MARKED["chatml"])
    for name, given in (("a", tmp_path / "lines.jsonl"), ("b", f"hf:{tmp_path}/data")):
        assert main(command(given, tokenizer, out / name, "--chat", "--eod-token", "</s>")) == 0
    for suffix in (".bin", ".idx", ".mask"):
        assert (out / f"a{suffix}").read_bytes() == (out / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("kind", ["saved", "parquet", "lines"])
def test_null_fields_of_a_table_are_left_out_but_for_content(kind: str, tmp_path: Path) -> None:
    rows = [{"messages": chat} for chat in CHATS]
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    else:
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records: list[dict[str, Any]] = []
    reading = Reading(make=lambda _, record: records.append(record) or Document("it"))  # type: ignore[func-returns-value]
    assert len(list(find_dataset(f"hf:{tmp_path}").documents(reading, lambda _: None))) == len(rows)
    assert records == rows


def test_other_columns_are_not_read(tmp_path: Path) -> None:
    pictures = [{"bytes": b"no picture", "path": None}]
    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    datasets.Dataset.from_dict({"text": ["alone"], "picture": pictures}, features).save_to_disk(tmp_path)
    assert list(read_texts([find_dataset(f"hf:{tmp_path}")], Reading(), "stop", Skipped())) == ["alone"]


def test_workers_change_nothing_and_shards_merged_are_one_store(tmp_path: Path, tokenizer_file: Path) -> None:
    saved, streamed = save(tmp_path / "saved"), write_lines(tmp_path / "streamed")
    for name, named, shards, workers in (("1", saved, 7, 1), ("2", saved, 7, 2), ("3", streamed, 3, 1)):
        more = ("--shards", str(shards), "--workers", str(workers))
        assert main(command(named, tokenizer_file, tmp_path / name / "p", *more)) == 0
        assert len(json.loads((tmp_path / name / "p.shards").read_text())["shards"]) == shards
    assert content(tmp_path / "1") == content(tmp_path / "2")
    for name, named in (("2", saved), ("3", streamed)):
        merged_is_one_store(named, tokenizer_file, tmp_path / name / "p")
        for path in (*tmp_path.glob("merged.*"), *tmp_path.glob("one.*")):
            path.unlink()


def test_a_dataset_is_one_source_of_a_shard_with_several_parts_of_it(
    out: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    (tmp_path / "more.jsonl").write_text("".join(LINES * 9))
    named, more = save(tmp_path / "data"), tmp_path / "more.jsonl"
    for name, shards in (("one", []), ("p", ["--shards", "2"])):
        assert main([named, *command(more, tokenizer_file, out / name, *shards)]) == 0
    assert merge([str(out / "merged"), str(out / "p")]) == 0
    for suffix in (".bin", ".idx", ".json"):
        assert (out / f"merged{suffix}").read_bytes() == (out / f"one{suffix}").read_bytes()
    described = [Description.read(out / f"p-0000{number}-of-00002") for number in range(2)]
    paths = [str(find_dataset(named)), str(more)]
    assert [[source.path for source in each.sources] for each in described if each] == [paths[:1], paths[1:]]


def test_shards_of_a_dataset_are_kept_or_made_anew(
    out: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = command(write_lines(tmp_path / "data"), tokenizer_file, out / "p", "--shards", "2")
    assert main(given) == 0
    expected = content(out)
    for suffix in (".bin", ".idx", ".json"):
        (out / f"p-00001-of-00002{suffix}").unlink()
    opened: list[int] = []
    documents = hf_dataset.DatasetPart.documents
    monkeypatch.setattr(
        hf_dataset.DatasetPart, "documents", lambda part, *given: opened.append(part.number) or documents(part, *given)
    )
    assert main(given) == 0
    assert opened == [1]
    assert content(out) == expected

    os.utime(tmp_path / "data/3.jsonl", ns=(1, 1))
    assert main(given) == 2
    assert "other input or settings" in capsys.readouterr().err
    (out / "p.shards").unlink()

    def changing(part: Any, *given: Any) -> Iterator[Document | Reject]:
        yield from documents(part, *given)
        os.utime(tmp_path / "data/3.jsonl", ns=(2, 2))

    monkeypatch.setattr(hf_dataset.DatasetPart, "documents", changing)
    assert main(given) == 2
    assert "has changed since the preparation began" in capsys.readouterr().err
    assert not (out / "p.shards").exists()


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    rows = [{"text": b"fine"}, {"text": None}, {"text": b"\xff"}, {"text": b" "}, {"text": b"long text"}]
    datasets.Dataset.from_list([{"meta": row} for row in rows]).save_to_disk(tmp_path / "data")
    named, reading, skipped = f"hf:{tmp_path}/data", Reading("meta.text", most=8), Skipped()
    assert list(read_texts([find_dataset(named)], reading, "skip", skipped)) == ["fine"]
    origin = str(find_dataset(named))
    assert skipped.lines() == [
        f"1 × field 'meta.text' is not a string, first {origin}:2",
        f"1 × not valid UTF-8, first {origin}:3",
        f"1 × empty document, first {origin}:4",
        f"1 × document too long, first {origin}:5",
    ]
    with pytest.raises(InputError, match=r":1: no field 'body': the fields are meta"):
        list(read_texts([find_dataset(named)], Reading("body"), "stop", Skipped()))
    rejects = find_dataset(named).cut(5)[2].documents(reading, lambda _: None)
    assert [str(reject) for reject in rejects] == [f"{origin}, part 3 of 5:1: not valid UTF-8: byte 0xff"]


def test_what_cannot_be_read_ends_it_even_with_skip(
    out: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = write_lines(tmp_path / "data")
    with (tmp_path / "data/2.jsonl").open("a") as file:
        file.write("{\n")
    assert main(command(named, tokenizer_file, out / "p", "--on-error", "skip")) == 2
    error = capsys.readouterr().err
    assert f"{named},config=default,split=train,fingerprint=" in error
    assert "cannot be read: " in error
    assert "all rows after it would be lost" in error
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("hf:two,split=valid", "has no split 'valid'; choose train or test with ,split=…"),
        ("hf:many", "has no split 'train'; choose .* with ,split=…"),
        ("hf:two,config=en", "its config is not known, not en"),
        ("hf:lines,revision=main", "its revision is not known, not main"),
        ("hf:lines,fingerprint=12", "its fingerprint is .{32}, not 12"),
        ("hf:lines,config=en", "cannot be read: .*'en' not found.*; the form is hf:NAME"),
        ("hf:lines,split=a,split=b", "split is given twice"),
        ("hf:lines,split=", "split has no value"),
        ("hf:,split=train", "names no dataset"),
        ("hf:nobody/here", "cannot be read: .*; the form is hf:NAME"),
        ("hf:lines/0.jsonl", "is a file; name it without hf:"),
        ("hf:empty", "cannot be read: .*any data files"),
        ("two", "two: is a dataset that save_to_disk has written; name it hf:two"),
    ],
)
def test_bad_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("two"))
    write_lines(Path("lines"))
    datasets.DatasetDict(a=table(), b=table()).save_to_disk("many")
    Path("empty").mkdir()
    with pytest.raises(InputError, match=message):
        find_inputs([named], None, Reading(), "skip", Skipped())


def test_a_dataset_that_is_given_twice_is_told(tmp_path: Path) -> None:
    named = save(tmp_path / "data")
    with pytest.raises(InputError, match="given twice"):
        find_inputs([named, f"{named},split=train"], None, Reading(), "stop", Skipped())
    assert len(find_inputs([named, f"{named},split=test"], None, Reading(), "stop", Skipped())) == 2


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    hf_dataset._library.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'megalite\[datasets\]'"):
        find_dataset("hf:somebody/something")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a dataset of two commits needs: README, listing and files, and which commit they are of."""

    protocol_version = "HTTP/1.1"
    commits = {"main": "1" * 40, "old": "2" * 40}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].partition("/datasets/somebody/tiny/")[2].partition("/")
        revision, _, name = rest.partition("/")
        commit = self.commits.get(revision, revision)
        files = {"README.md": b"# tiny\n"}
        files |= {f"train-{n}.jsonl": b'{"text": "of %s, %d"}\n' % (commit[:1].encode(), n) for n in range(2)}
        self.asked.append(revision)
        if kind == "revision":
            self.answer(json.dumps({"id": "somebody/tiny", "sha": commit, "siblings": []}).encode())
        elif kind == "tree":
            found = [{"type": "file", "path": file, "size": len(body), "oid": "0"} for file, body in files.items()]
            self.answer(json.dumps([each for each in found if each["path"].startswith(name)]).encode())
        elif name in files:
            self.answer(files[name], {"X-Repo-Commit": commit, "ETag": '"1"'})
        else:
            self.answer(b"", {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"}, 404)

    do_HEAD = do_GET

    def answer(self, body: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        """Say nothing."""


def test_a_stream_of_the_hub_is_pinned_to_the_commit_that_a_revision_is(
    out: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}  # other tests of this process may be offline
        environment = {**os.environ, **online, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        program = [sys.executable, "-m", "megalite_tools.data.prepare_data"]
        given = command("hf:somebody/tiny,revision=old", tokenizer_file, out / "p")
        done = subprocess.run(
            [*program, *given],
            env={**environment, "HF_HOME": str(tmp_path)},
            timeout=120,
            capture_output=True,
            text=True,
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    described = Description.read(out / "p")
    assert described is not None
    commit = Hub.commits["old"]
    size = 2 * len(b'{"text": "of 2, 0"}\n')
    assert described.sources == (SourceFile(f"hf:somebody/tiny,config=default,split=train,revision={commit}", size),)
    assert described.documents == 2
    assert set(filter(None, Hub.asked)) == {"old", commit}


def test_a_copy_of_no_known_commit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may fall back to one in its cache, of whatever revision, where the Hub cannot be reached."""
    library = SimpleNamespace(load_dataset_builder=lambda *given, **named: SimpleNamespace(base_path=None))
    monkeypatch.setattr(hf_dataset, "_library", lambda: library)
    with pytest.raises(InputError, match="the Hub tells no commit of it"):
        find_dataset("hf:somebody/tiny,revision=old")
