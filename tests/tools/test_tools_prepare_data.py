import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.data.store import TokenStore
from megalite.data.tokenizer import load_tokenizer
from megalite_tools import prepare_data
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(
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
    assert main(arguments) == 130
    assert "interrupted" in capsys.readouterr().err
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
