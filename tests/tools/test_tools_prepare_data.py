import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalite.data.description import Description, SourceFile, TokenizerFile
from megalite.data.store import StoreWriter, TokenStore
from megalite.data.tokenizer import load_tokenizer, tokenizer_hash
from megalite.stop import STOP
from megalite_tools import commands, prepare_data
from megalite_tools.encode import Encoded
from megalite_tools.prepare_data import in_validation, main

EOD = 2


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to write to."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus_texts()))
    return path


def corpus_texts() -> list[str]:
    return [f"document {i} says " + "hello " * (i % 7) for i in range(300)]


def decoded(prefix: Path, tokenizer_file: Path) -> list[str]:
    store, tokenizer = TokenStore(prefix), load_tokenizer(tokenizer_file)
    store.verify(tokenizer.vocab_size)
    documents = [store.document(i).tolist() for i in range(store.documents)]
    assert all(document[-1] == EOD and EOD not in document[:-1] for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_document_is_there_in_order(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out.parent / "more").mkdir()
    for name in ("b.txt", "a.txt", "c.md"):
        (out.parent / "more" / name).write_text(f"{name}\n\tbody\n")
    inputs = [str(out.parent / "more"), str(corpus)]
    assert main([*inputs, "--tokenizer", str(tokenizer_file), "--out", str(out / "all"), "--workers", "1"]) == 0
    expected = ["a.txt\n\tbody\n", "b.txt\n\tbody\n", *corpus_texts()]
    assert decoded(out / "all", tokenizer_file) == expected
    assert names(out) == ["all.bin", "all.idx", "all.json"]
    assert f"302 documents, {TokenStore(out / 'all').tokens:,} tokens" in capsys.readouterr().out


def test_without_end_of_document_tokens(out: Path, corpus: Path, tokenizer_file: Path) -> None:
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--workers", "1"]
    assert main([*arguments, "--out", str(out / "a"), "--no-eod"]) == 0
    assert main([*arguments, "--out", str(out / "b"), "--eod-token", "<s>"]) == 0
    bare, ended = TokenStore(out / "a"), TokenStore(out / "b")
    assert ended.tokens == bare.tokens + 300
    assert ended.document(5).tolist() == [*bare.document(5).tolist(), 1]


def test_output_does_not_depend_on_workers(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite_tools.encode.BATCH_DOCUMENTS", 11)
    for workers in ("1", "3"):
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--valid-fraction", "0.1"]
        assert main([*arguments, "--workers", workers, "--out", str(out / workers)]) == 0
    for suffix in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx"):
        assert (out / f"1{suffix}").read_bytes() == (out / f"3{suffix}").read_bytes()


def test_the_split_is_by_document_and_seed(out: Path, corpus: Path, tokenizer_file: Path) -> None:
    held_out = []
    for seed in ("0", "1"):
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--workers", "1", "--valid-fraction", "0.2"]
        assert main([*arguments, "--seed", seed, "--out", str(out / seed)]) == 0
        train, valid = (decoded(out / f"{seed}{suffix}", tokenizer_file) for suffix in ("_train", "_valid"))
        assert sorted(train + valid) == sorted(corpus_texts())
        assert train == [text for text in corpus_texts() if text in train]
        held_out.append(valid)
    assert held_out[0] != held_out[1]
    assert all(30 < len(valid) < 90 for valid in held_out)


def test_held_out_documents_stay_held_out_when_the_corpus_grows() -> None:
    chosen = [i for i in range(10_000) if in_validation(i, seed=3, fraction=0.05)]
    assert 400 < len(chosen) < 600
    assert set(chosen) <= {i for i in range(10_000) if in_validation(i, seed=3, fraction=0.1)}


BROKEN = [b'{"text": "fine"}', b'{"text": ""}', b'{"body": 1}', b"{", b'{"text": 5}', b'{"text": "\xff"}', b"{"]


def test_skipping_counts_by_reason(
    out: Path, tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "broken.jsonl"
    source.write_bytes(b"\n".join(BROKEN))
    arguments = [str(source), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--on-error", "skip"]) == 0
    assert decoded(out / "p", tokenizer_file) == ["fine"]
    printed = capsys.readouterr().out
    assert f"skipped 2 × not valid JSON, first {source}:4" in printed
    for reason in ("empty document", "no field 'text'", "field 'text' is not a string", "not valid UTF-8"):
        assert f"skipped 1 × {reason}, first {source}:" in printed


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_document_stops_and_leaves_nothing(
    out: Path, tokenizer_file: Path, corpus: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    with corpus.open("a") as file:
        file.write("{\n")
    arguments = ["--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", workers]
    assert main([str(corpus), *arguments, "--valid-fraction", "0.1"]) == 2
    error = capsys.readouterr().err
    assert f"megalite-prepare-data: error: {corpus}:301: not valid JSON" in error
    assert "--on-error skip" in error
    assert names(out) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--valid-fraction": "1.0"}, "--valid-fraction 1.0 is not in [0, 1)"),
        ({"--valid-fraction": "nan"}, "--valid-fraction nan"),
        ({"--valid-fraction": "0.9999999"}, "all 300 documents fell to validation"),
        ({"--workers": "0"}, "--workers 0 is not at least 1"),
        ({"--tokenizer": "gone.model"}, "gone.model: no such tokenizer file"),
        ({"--eod-token": "<|nope|>"}, "no token '<|nope|>'"),
        ({"--json-key": "body"}, "no field 'body': the fields are text"),
    ],
)
def test_bad_options_are_told_and_leave_nothing(
    out: Path,
    corpus: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    options = {"--tokenizer": str(tokenizer_file), "--out": str(out / "p"), "--workers": "1"} | changes
    assert main([str(corpus), *(word for pair in options.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err
    assert names(out) == []


def test_nothing_usable_is_an_error(
    out: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank.txt").write_text("\n")
    arguments = ["--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([str(tmp_path / "blank.txt"), *arguments]) == 2
    assert "no usable document in the input: 1 × empty document" in capsys.readouterr().err
    assert names(out) == []


def test_an_empty_validation_split_is_told(
    out: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    arguments = ["--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([str(tmp_path / "one.txt"), *arguments, "--valid-fraction", "0.001"]) == 0
    assert "this split is empty" in capsys.readouterr().out
    assert TokenStore(out / "p_valid").documents == 0


def test_an_existing_store_is_kept(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "p_valid.idx").write_bytes(b"precious")
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    assert "p_valid.idx: exists already" in capsys.readouterr().err
    assert names(out) == ["p_valid.idx"]


def test_a_disk_that_fills_up_leaves_nothing(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
        assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "p_train: cannot write the store: File too large" in capsys.readouterr().err
    assert names(out) == []


def test_either_both_splits_appear_or_neither(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = iter(range(10))
    real = os.fsync

    def full_at_the_last_file(descriptor: int) -> None:
        if next(synced) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr("megalite.data.store.os.fsync", full_at_the_last_file)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    assert names(out) == []


@pytest.mark.parametrize("number", STOP)
def test_a_signal_leaves_nothing(
    out: Path,
    corpus: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    seen: list[list[str]] = []

    def interrupted(*arguments: object) -> Iterator[str]:
        yield from ["some text"] * 100
        seen.append(names(out))
        os.kill(os.getpid(), number)
        yield "more"

    monkeypatch.setattr(prepare_data, "read_texts", interrupted)
    monkeypatch.setattr("megalite_tools.encode.BATCH_DOCUMENTS", 10)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["megalite-prepare-data", *arguments])
    before = [signal.getsignal(number) for number in STOP]
    assert commands.prepare_data() == (130 if number == signal.SIGINT else 3)
    assert capsys.readouterr().err.splitlines()[-1] == f"megalite-prepare-data: stopped by {number.name}"
    assert [signal.getsignal(number) for number in STOP] == before
    assert len(seen) == 1
    assert [name.startswith(".p.partial") for name in seen[0]] == [True]
    assert names(out) == []


def dies(*arguments: object) -> None:
    os._exit(1)


def test_a_worker_that_dies_is_a_clear_error(
    out: Path,
    corpus: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megalite_tools.encode.encode_batch", dies)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "2"]
    assert main(arguments) == 2
    assert "a worker process died" in capsys.readouterr().err
    assert names(out) == []


def test_a_store_is_described(out: Path, corpus: Path, tokenizer_file: Path) -> None:
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--workers", "1"]
    assert main([*arguments, "--out", str(out / "a"), "--valid-fraction", "0.1"]) == 0
    assert main([*arguments, "--out", str(out / "b"), "--no-eod"]) == 0
    train, valid, bare = (Description.read(out / name) for name in ("a_train", "a_valid", "b"))
    assert train is not None
    assert valid is not None
    assert bare is not None
    assert train.tokenizer == TokenizerFile(tokenizer_file.name, tokenizer_hash(tokenizer_file))
    assert (train.end_of_document, valid.end_of_document, bare.end_of_document) == (EOD, EOD, None)
    assert train.documents + valid.documents == bare.documents == 300
    assert train.sources == (SourceFile(str(corpus), corpus.stat().st_size),)
    assert train.largest_id == TokenStore(out / "a_train").verify().largest_id


def test_a_long_document_is_shared_by_all_workers(
    out: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i} of a long document\n" for i in range(2000))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("a short one")
    monkeypatch.setattr("megalite_tools.pieces.PIECE", 5000)
    monkeypatch.setattr("megalite_tools.encode.BATCH_CHARACTERS", 5000)
    batches: list[Encoded] = []
    encode = prepare_data.encode_texts
    monkeypatch.setattr(prepare_data, "encode_texts", lambda *given: noted(encode(*given), batches))
    arguments = ["--tokenizer", str(tokenizer_file), "--workers", "1", "--out", str(out / "p")]
    assert main([str(tmp_path / "long.txt"), str(tmp_path / "short.txt"), *arguments]) == 0
    assert decoded(out / "p", tokenizer_file) == [text, "a short one"]
    assert TokenStore(out / "p").document(0).tolist() == [*load_tokenizer(tokenizer_file).encode(text), EOD]
    assert len(batches) > 5


def noted(batches: Iterator[Encoded], notes: list[Encoded]) -> Iterator[Encoded]:
    for batch in batches:
        notes.append(batch)
        yield batch


def test_lines_are_documents_if_asked(out: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "d.txt").write_text("one\ntwo\n")
    arguments = [str(tmp_path / "d.txt"), "--tokenizer", str(tokenizer_file), "--workers", "1"]
    assert main([*arguments, "--lines", "--out", str(out / "lines")]) == 0
    assert main([*arguments, "--separator", "e\nt", "--out", str(out / "cut")]) == 0
    assert decoded(out / "lines", tokenizer_file) == ["one", "two"]
    assert decoded(out / "cut", tokenizer_file) == ["on", "wo\n"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lines"], "are for text files, and none was given"),
        (["--lines", "--separator", "x"], "--lines and --separator exclude each other"),
        (["--separator", ""], "--separator is empty"),
        (["--encoding", "utf-9"], "--encoding utf-9: unknown encoding"),
        (["--max-document", "0"], "--max-document 0 is not at least 1"),
        (["--max-document", "20"], "corpus.jsonl:1: document too long: more than 20 bytes"),
    ],
)
def test_options_of_reading_are_checked(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err
    assert names(out) == []


def test_a_second_run_with_the_same_name_is_refused_at_once(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    with StoreWriter(out / "p", "uint16") as other:
        other.add([1, 2])
        assert main(arguments) == 2
        assert "p: is being written by another process" in capsys.readouterr().err
    assert TokenStore(out / "p").tokens == 2


def test_an_interruption_that_comes_too_late_changes_nothing(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two stores that appear together."""
    publish = StoreWriter._publish

    def interrupted(writer: StoreWriter) -> None:
        publish(writer)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StoreWriter, "_publish", interrupted)
    before = signal.getsignal(signal.SIGINT)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 0
    assert [name for name in names(out) if name.endswith(".idx")] == ["p_train.idx", "p_valid.idx"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_run_leaves_no_worker_and_the_next_one_no_file(
    out: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    os.mkfifo(tmp_path / "fifo")  # never written to: the run waits for more documents
    corpus.write_text("text of a document\n" * 5000)
    code = (
        "import sys; from megalite_tools import encode, prepare_data\n"
        "encode.BATCH_DOCUMENTS = 100\n"
        "texts = prepare_data.read_texts\n"
        "def waiting(*given):\n"
        "    yield from texts(*given)\n"
        "    open(sys.argv[1]).read()\n"
        "prepare_data.read_texts = waiting\n"
        "sys.exit(prepare_data.main(sys.argv[2:]))"
    )
    arguments = [str(corpus), "--lines", "--tokenizer", str(tokenizer_file), "--out", str(out / "p")]
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "fifo"),
        *arguments,
        "--workers",
        "2",
        "--valid-fraction",
        "0.1",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            wait_until(lambda: len(children(run.pid)) == 3)
            workers = children(run.pid)  # and the tracker of shared resources
        finally:
            run.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert len(names(out)) == 2
    assert main([*arguments, "--workers", "1"]) == 0
    assert names(out) == ["p.bin", "p.idx", "p.json"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
