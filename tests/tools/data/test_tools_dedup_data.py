"""Exact copies of documents are left out, whatever fits in memory and whoever hashes."""

import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools_prepare_data import names
from tokenizer_cases import write_tokenizer

from megalite.data.description import Description, TokenizerFile
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer, tokenizer_hash
from megalite_tools.data import dedup_data
from megalite_tools.data.dedup_data import main
from megalite_tools.data.duplicates import BYTES_PER_DOCUMENT, KEY, DuplicateFinder, normalized


def write(prefix: Path, documents: list[list[int]], **given: object) -> str:
    with StoreWriter(prefix, "uint16", **given) as writer:  # type: ignore[arg-type]
        for document in documents:
            writer.add(np.array(document, np.int64))
    return str(prefix)


def documents_of(prefix: Path) -> list[list[int]]:
    store = TokenStore(prefix)
    store.verify()
    return [store.document(at).tolist() for at in range(store.documents)]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 8), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_copies_are_found_however_many_fit_in_memory(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], part: int, fitting: int
) -> None:
    keys = np.array([(number % 3, number) for number in numbers], KEY)
    finder = DuplicateFinder(len(keys), fitting * BYTES_PER_DOCUMENT, tmp_path_factory.getbasetemp())
    found = finder.find(keys[at : at + part] for at in range(0, len(keys), part))
    assert found.tolist() == [number in numbers[:at] for at, number in enumerate(numbers)]


def test_memory_is_bounded(tmp_path: Path) -> None:
    count, part = 400_000, 4000
    random = np.random.default_rng(0)

    def keys(at: int) -> np.ndarray:
        found = np.empty(part, KEY)
        found["high"], found["low"] = random.integers(1 << 20, size=(2, part)) if at else (1, 2)
        return found

    finder = DuplicateFinder(count, count * BYTES_PER_DOCUMENT / 20, tmp_path)
    tracemalloc.start()
    try:
        found = finder.find(map(keys, range(count // part)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found[1:part].all()
    assert not found[0]
    assert peak < 1.5 * count * BYTES_PER_DOCUMENT / 20 + count


def test_the_first_of_equal_documents_stays(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"end_of_document": 2, "tokenizer": TokenizerFile("t.model", "ab" * 32)}
    inputs = [
        write(tmp_path / "a", [[5, 2], [6, 2], [5, 2], [2]], **made),
        write(tmp_path / "b", [[7, 2], [6, 2], [2], [5, 5, 2]], **made),
    ]
    monkeypatch.setattr(dedup_data, "SPAN_DOCUMENTS", 3)
    for name, options in (("one", ["--workers", "1"]), ("two", ["--workers", "2", "--memory", "5e-7"])):
        assert main([str(out / name), *inputs, *options]) == 0
        assert documents_of(out / name) == [[5, 2], [6, 2], [2], [7, 2], [5, 5, 2]]
        printed = capsys.readouterr().out
        assert "left out 3 copies of earlier ones, 37.50% of 8 documents: 5 tokens" in printed
    for suffix in (".bin", ".idx", ".json"):
        assert (out / f"one{suffix}").read_bytes() == (out / f"two{suffix}").read_bytes()
    described = Description.read(out / "one")
    assert described is not None
    assert (described.end_of_document, described.tokenizer) == (2, TokenizerFile("t.model", "ab" * 32))
    assert main([str(out / "again"), str(out / "one"), "--workers", "1"]) == 0
    assert documents_of(out / "again") == documents_of(out / "one")


def test_texts_that_differ_in_case_and_blanks_alone_are_equal(
    out: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    texts = ["The fox", "the\n fox ", "the foxes", "THE\u00a0FOX", "the fox?"]
    documents = [[*tokenizer.encode(text), 2] for text in texts]
    documents.append([*tokenizer.encode("the fox"), 2])
    made_with = TokenizerFile(tokenizer.name, tokenizer_hash(tokenizer_file))
    store = write(tmp_path / "store", documents, end_of_document=2, tokenizer=made_with)
    arguments = [store, "--workers", "1"]
    assert main([str(out / "tokens"), *arguments]) == 0
    assert len(documents_of(out / "tokens")) == 6
    assert main([str(out / "texts"), *arguments, "--tokenizer", str(tokenizer_file)]) == 0
    assert documents_of(out / "texts") == [documents[at] for at in (0, 2, 4)]
    (tmp_path / "other.model").write_bytes(tokenizer_file.read_bytes() + b"\x12\x00")
    capsys.readouterr()
    assert main([str(out / "other"), *arguments, "--tokenizer", str(tmp_path / "other.model")]) == 2
    assert "the stores were made with another tokenizer" in capsys.readouterr().err


def test_special_tokens_at_the_end_are_no_text(out: Path, tmp_path: Path) -> None:
    """A tokenizer of Hugging Face decodes them to their names."""
    path = write_tokenizer(tmp_path / "tokenizer", "carried")
    tokenizer = load_tokenizer(path)
    assert tokenizer.eod is not None
    assert "fox" in tokenizer.decode([*tokenizer.encode("fox"), tokenizer.eod]) != "fox"
    documents = [[*tokenizer.encode(text), tokenizer.eod] for text in ("the fox", "the fox\n", "the fox.")]
    assert (
        main([str(out / "new"), write(tmp_path / "store", documents), "--tokenizer", str(path), "--workers", "1"]) == 0
    )
    assert documents_of(out / "new") == [documents[0], documents[2]]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Straße", "STRASSE", True),
        ("ﬁne\t\u3000text", "fine text", True),
        ("é", "e\u0301", True),
        ("a b", "ab", False),
        ("a-b", "a b", False),
        ("e", "é", False),
        ("10", "11", False),
    ],
)
def test_normalized_texts(one: str, other: str, equal: bool) -> None:
    assert (normalized(one) == normalized(other)) is equal


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "0"], "--memory 0.0: must be above 0"),
        (["--memory", "nan"], "--memory nan: must be above 0"),
        (["--memory", "1e-9"], "--memory 1e-09: 600 documents need at least "),
        (["--workers", "0"], "--workers 0 is not from 1 to 1024"),
    ],
)
def test_bad_options_leave_nothing(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    store = write(tmp_path / "store", [[5]] * 600)
    assert main([str(out / "new"), store, *options]) == 2
    assert told in capsys.readouterr().err
    assert names(out) == []


def test_a_disk_that_is_full_of_hashes_leaves_nothing(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write(tmp_path / "store", [[number] for number in range(5000)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert main([str(out / "new"), store, "--workers", "1", "--memory", "4e-4"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{out}: cannot write hashes of documents: File too large" in capsys.readouterr().err
    assert os.listdir(out) == []
