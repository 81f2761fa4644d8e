"""Documents fill sequences whole, in a way that follows from their lengths alone."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.model_schema import Model
from megalite.config.schema import Data, Source
from megalite.data.check import Scans, check_data
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer
from megalite.plan.batches import GlobalBatch
from megalite_tools.data.inspect_data import main as inspect
from megalite_tools.data.pack import best_fit_decreasing, pack
from megalite_tools.data.prepare_data import main

LENGTHS = st.integers(1, 20).flatmap(
    lambda room: st.tuples(st.lists(st.integers(1, room), min_size=1, max_size=30), st.just(room))
)
END = 9


def plainly(lengths: list[int], room: int) -> list[int]:
    """Best fit decreasing by looking at every sequence; the one that has had its room for longest comes first."""
    left: list[int] = []
    since: list[int] = []
    placed = [0] * len(lengths)
    for turn, document in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        fits = [number for number, free in enumerate(left) if free >= lengths[document]]
        if not fits:
            left.append(room)
            since.append(turn)
            fits = [len(left) - 1]
        chosen = min(fits, key=lambda number: (left[number], since[number]))
        left[chosen] -= lengths[document]
        since[chosen] = turn
        placed[document] = chosen
    return placed


@given(LENGTHS)
def test_each_document_goes_where_it_leaves_the_least_room(case: tuple[list[int], int]) -> None:
    lengths, room = case
    assert best_fit_decreasing(np.array(lengths, "<i4"), room).tolist() == plainly(lengths, room)


def packed(folder: Path, documents: list[tuple[list[int], list[bool]]], length: int) -> TokenStore:
    for name in ("loose", "packed"):
        for old in folder.glob(f"{name}.*"):
            old.unlink()
    with StoreWriter(folder / "loose", "uint16", masked=True) as writer:
        for tokens, bits in documents:
            writer.add(tokens, bits)
    with StoreWriter(folder / "packed", "uint16", END, masked=True, packed=length) as writer:
        told: list[int] = []
        pack(TokenStore(folder / "loose"), writer, length, END, told.append)
    assert sum(told) == sum(len(tokens) for tokens, _ in documents if len(tokens) <= length)
    return TokenStore(folder / "packed")


def test_every_document_is_whole_in_one_sample_with_its_mask(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [
        ([100 + number] * (length - 1) + [END], [number % 3 == 0] * length)
        for number, length in enumerate(random.integers(1, 17, 60))
    ]
    store = packed(tmp_path, documents, 16)
    assert store.tokens % 16 == 1
    found = []
    for sequence in range(store.tokens // 16):
        begins = [0, *store.begins(16 * sequence, 16).tolist(), 16]
        for start, end in pairwise(begins):
            tokens = store.read(16 * sequence + start, end - start).tolist()
            bits = store.trained(16 * sequence + start, end - start).tolist()
            found.append((tokens, bits))
    padding = [each for each in found if set(each[0]) == {END} and not any(each[1])]
    assert sorted(each for each in found if each not in padding) == sorted(
        each for each in documents if each[0] != [END] or any(each[1])
    )
    samples = Samples([Source(str(tmp_path / "packed"))], 0, 16, 200)
    assert samples.parts[0].samples == store.tokens // 16  # the last sequence is not lost
    read = Loader(samples, 1, 1, 0).read(GlobalBatch(0, samples.parts[0].samples))
    assert read.trained is not None
    total = sum(sum(bits) for _, bits in documents) - int(store.trained(0, 1)[0])  # the first token is no target
    assert read.trained.count == total


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (1 + number % 13)}) + "\n" for number in range(200)))
    return str(path)


def test_any_data_can_be_packed(
    text: str, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [text, "--tokenizer", str(tokenizer_file), "--valid-fraction", "0.2"]
    assert main([*arguments, "--out", str(tmp_path / "plain")]) == 0
    for workers in ("1", "2"):
        assert main([*arguments, "--out", str(tmp_path / f"p{workers}"), "--pack", "70", "--workers", workers]) == 0
    assert " of 70 tokens, " in capsys.readouterr().out
    end = load_tokenizer(tokenizer_file).eod
    for split in ("_train", "_valid"):
        plain, store = (TokenStore(tmp_path / f"{name}{split}") for name in ("plain", "p1"))
        assert int(store.trained(0, store.tokens).sum()) == plain.tokens
        documents = [tuple(store.document(number).tolist()) for number in range(store.documents)]
        filled = sorted(each for each in documents if set(each) != {end})
        assert filled == sorted(tuple(plain.document(number).tolist()) for number in range(plain.documents))
        for suffix in (".bin", ".idx", ".mask", ".json"):
            one, two = ((tmp_path / f"p{workers}{split}{suffix}").read_bytes() for workers in "12")
            assert one == two
    assert not list(tmp_path.glob(".*"))


def test_a_document_that_fits_nowhere_is_told_or_left_out(
    text: str, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [text, "--tokenizer", str(tokenizer_file), "--out", str(tmp_path / "o"), "--pack"]
    assert main([*arguments, "16"]) == 2
    assert "document longer than a sequence" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert main([*arguments, "2", "--on-error", "skip"]) == 2
    assert "no document fits into --pack 2" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name != "t.jsonl"]
    assert main([*arguments, "16", "--on-error", "skip"]) == 0
    assert "× document longer than a sequence, first" in capsys.readouterr().out
    assert main([text, "--tokenizer", str(tokenizer_file), "--out", str(tmp_path / "n"), "--pack", "1"]) == 2
    assert "--pack 1: needs 2 or more tokens" in capsys.readouterr().err


def test_a_store_described_anew_is_packed_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path, [([100, END], [True, True])] * 41, 16)
    assert inspect([str(tmp_path / "packed"), "--describe"]) == 0
    assert inspect([str(tmp_path / "packed"), "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("whole documents fill sequences of 16 tokens") == 2
    assert "min 2 · median 2 · mean 2.0 · max 2 " in printed
    assert "none in" not in printed.splitlines()[-3]
    assert "document 0 (2 tokens): «100 9»\n" in printed
    assert "document 41 (15 tokens): padding\n" in printed


@pytest.mark.parametrize(("length", "warns"), [(16, False), (32, False), (8, True), (24, True)])
def test_training_tells_where_sequences_cut_documents(tmp_path: Path, length: int, warns: bool) -> None:
    packed(tmp_path, [([100, END], [True, True])] * 40, 16)
    model = Model(vocab_size=200, sequence_length=length)
    found = check_data(Data(train=[Source(str(tmp_path / "packed"))]), model, Scans(tmp_path / "data.json"))
    assert (
        any(f"model.sequence_length = {length}, no multiple of that, cuts some" in each for each in found.warnings)
        == warns
    )
