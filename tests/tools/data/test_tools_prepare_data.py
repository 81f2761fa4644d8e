from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.data.description import Description, SourceFile, TokenizerFile
from megalite.data.store import TokenStore
from megalite.data.tokenizer import load_tokenizer, tokenizer_hash
from megalite_tools.data import preparation
from megalite_tools.data.encode import Encoded
from megalite_tools.data.held_out import in_validation
from megalite_tools.data.prepare_data import main

EOD = 2


def decoded(prefix: Path, tokenizer_file: Path) -> list[str]:
    store, tokenizer = TokenStore(prefix), load_tokenizer(tokenizer_file)
    store.verify(tokenizer.vocab_size)
    documents = [store.document(i).tolist() for i in range(store.documents)]
    assert all(document[-1] == EOD and EOD not in document[:-1] for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_document_is_there_in_order(
    out: Path, corpus: Path, corpus_texts: list[str], tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out.parent / "more").mkdir()
    for name in ("b.txt", "a.txt", "c.log"):
        (out.parent / "more" / name).write_text(f"{name}\n\tbody\n")
    inputs = [str(out.parent / "more"), str(corpus)]
    assert main([*inputs, "--tokenizer", str(tokenizer_file), "--out", str(out / "all"), "--workers", "1"]) == 0
    expected = ["a.txt\n\tbody\n", "b.txt\n\tbody\n", *corpus_texts]
    assert decoded(out / "all", tokenizer_file) == expected
    assert names(out) == ["all.bin", "all.idx", "all.json"]
    printed = capsys.readouterr().out
    written = f"{out}/all.bin, {out}/all.idx and {out}/all.json"
    assert f"{written}: 302 documents, {TokenStore(out / 'all').tokens:,} tokens" in printed
    assert f"skipped 1 × unknown format, first {out.parent}/more/c.log" in printed


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
    monkeypatch.setattr("megalite_tools.data.encode.BATCH_DOCUMENTS", 11)
    for workers in ("1", "3"):
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--valid-fraction", "0.1"]
        assert main([*arguments, "--workers", workers, "--out", str(out / workers)]) == 0
    for suffix in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx"):
        assert (out / f"1{suffix}").read_bytes() == (out / f"3{suffix}").read_bytes()


def test_the_split_is_by_document_and_seed(
    out: Path, corpus: Path, corpus_texts: list[str], tokenizer_file: Path
) -> None:
    held_out = []
    for seed in ("0", "1"):
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--workers", "1", "--valid-fraction", "0.2"]
        assert main([*arguments, "--seed", seed, "--out", str(out / seed)]) == 0
        train, valid = (decoded(out / f"{seed}{suffix}", tokenizer_file) for suffix in ("_train", "_valid"))
        assert sorted(train + valid) == sorted(corpus_texts)
        assert train == [text for text in corpus_texts if text in train]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--valid-fraction": "1.0"}, "--valid-fraction 1.0: must be at least 0 and below 1"),
        ({"--valid-fraction": "nan"}, "--valid-fraction nan"),
        ({"--valid-fraction": "0.9999999"}, "all 300 documents fell to validation"),
        ({"--workers": "0"}, "--workers 0 is not from 1 to 1024"),
        ({"--workers": "1025"}, "--workers 1025 is not from 1 to 1024"),
        ({"--out": "texts/"}, "--out texts/: ends with a slash; add the name of the store, as in texts/corpus"),
        ({"--out": ".."}, "..: not a name for a token store"),
        ({"--separator": "\udcff"}, "--separator '\\udcff' is not valid UTF-8"),
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
    (tmp_path / "blank.txt").write_text("")
    assert main([str(tmp_path / "blank.txt"), *arguments]) == 2
    assert f"no usable document in the input: {tmp_path / 'blank.txt'} is empty" in capsys.readouterr().err
    assert names(out) == []


def test_an_empty_validation_split_is_told(
    out: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    arguments = ["--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([str(tmp_path / "one.txt"), *arguments, "--valid-fraction", "0.001"]) == 0
    assert "this split is empty" in capsys.readouterr().out
    assert TokenStore(out / "p_valid").documents == 0


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
    monkeypatch.setattr("megalite_tools.data.pieces.PIECE", 5000)
    monkeypatch.setattr("megalite_tools.data.encode.BATCH_CHARACTERS", 5000)
    batches: list[Encoded] = []
    encode = preparation.encode_texts
    monkeypatch.setattr(preparation, "encode_texts", lambda *given: noted(encode(*given), batches))
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
        (["--lines"], "are for text files, but no input is one"),
        (["--lines", "--separator", "x"], "--lines and --separator cannot be used together"),
        (["--separator", ""], "--separator is empty"),
        (["--encoding", "utf-9"], "--encoding utf-9: unknown encoding"),
        (["--max-document", "0"], "--max-document 0: must be at least 1"),
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
