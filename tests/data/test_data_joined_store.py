"""Lists of shards: read as the one store that has their documents, and refused where shards differ."""

import dataclasses
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_store import packed, put

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.schema import Data, Source
from megalite.data.check import Scans, check_data, checked_description
from megalite.data.data_file import DataFile
from megalite.data.description import Description, SourceFile, TokenizerFile
from megalite.data.joined_files import JoinedParts
from megalite.data.joined_store import JoinedStore, open_store
from megalite.data.samples import Samples
from megalite.data.shards import Shard, write_shards
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter

TOKENIZER = TokenizerFile("t.model", "ab" * 32)
Document = list[tuple[int, bool]]  # tokens, each with whether it is trained
DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=9), max_size=5)


def write(prefix: Path, documents: Sequence[Document], masked: bool = False, **given: object) -> TokenStore:
    with StoreWriter(prefix, "uint16", masked=masked, **given) as writer:  # type: ignore[arg-type]
        for document in documents:
            tokens, trained = [token for token, _ in document], [bit for _, bit in document]
            writer.add(np.array(tokens, np.int64), np.array(trained, bool) if masked else None)
    return TokenStore(prefix)


def list_of(prefix: Path, stores: Sequence[TokenStore]) -> TokenStore:
    shards = [Shard(Path(each.prefix).name, each.documents, each.tokens) for each in stores]
    write_shards(prefix, shards)
    return open_store(prefix)


def source(path: str) -> SourceFile:
    return SourceFile(path, 7)


def content(file: DataFile) -> bytes:
    return file.read([(0, file.size)])[0].tobytes()


@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 3]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_list_is_the_store_of_all_documents(
    parts: list[list[Document]], masked: bool, end: int | None, data: st.DataObject
) -> None:
    if end is not None:
        parts = [[[*document, (end, True)] for document in part] for part in parts]
    documents = [document for part in parts for document in part]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = {"end_of_document": end, "tokenizer": TOKENIZER}
        stores = [
            write(folder / f"part{at}", part, masked, sources=[source(f"{at}.txt"), source("shared.txt")], **told)
            for at, part in enumerate(parts)
        ]
        sources = list(dict.fromkeys(source(each) for at in range(len(parts)) for each in (f"{at}.txt", "shared.txt")))
        whole = write(folder / "whole", documents, masked, sources=sources, **told)
        listed = list_of(folder / "list", stores)
        assert listed.shards != (listed,)
        for ours, theirs in zip(listed.files, whole.files, strict=True):
            assert content(ours) == content(theirs)
            ranges = data.draw(
                st.lists(st.tuples(*[st.integers(0, theirs.size)] * 2).map(lambda at: tuple(sorted(at))), max_size=4)
            )
            assert [each.tobytes() for each in ours.read(ranges)] == [each.tobytes() for each in theirs.read(ranges)]
        assert listed.fingerprint() == whole.fingerprint()
        assert listed.verify() == whole.verify()
        for at in range(whole.documents):
            assert listed.bounds(at) == whole.bounds(at)
            assert listed.document(at).tolist() == whole.document(at).tolist()
        step = data.draw(st.integers(1, 3))
        assert listed.lengths[1::step].tolist() == whole.lengths[1::step].tolist()
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.tokens)] * 2)))
        assert listed.begins(start, stop - start).tolist() == whole.begins(start, stop - start).tolist()
        assert listed.trained(start, stop - start).tolist() == whole.trained(start, stop - start).tolist()
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, whole.documents)] * 2)))
        lengths = [len(document) for document in documents[first:last]]
        assert listed.index.document_lengths(first, last).tolist() == lengths
        assert checked_description(listed) == Description.read(whole.prefix)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_samples_come_in_the_order_of_the_merged_store(lengths: list[list[int]], sequence: int) -> None:
    parts = [
        [[(7 * n % 90 + part, n % 3 > 0) for n in range(length)] for length in each]
        for part, each in enumerate(lengths)
    ]
    if sum(map(sum, lengths)) <= sequence:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stores = [write(folder / f"part{at}", part, True) for at, part in enumerate(parts)]
        whole = write(folder / "whole", [document for part in parts for document in part], True)
        listed = list_of(folder / "list", stores)
        ours, theirs = (Samples([Source(each.prefix)], 5, sequence, 100) for each in (listed, whole))
        assert ours.fingerprints() == theirs.fingerprints()
        for found, expected in zip(ours.read(range(40)), theirs.read(range(40)), strict=True):
            for field in dataclasses.fields(expected):
                assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
        assert ours.trained_targets(range(40)) == theirs.trained_targets(range(40))


def test_parts_on_servers_are_asked_at_the_same_time() -> None:
    meeting = Barrier(3, timeout=20)

    def read(part: int, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        meeting.wait()  # fails unless all three parts are being read
        return [np.arange(start, stop) + 10 * part for start, stop in ranges]

    found = JoinedParts([2, 3, 0, 2], read, at_once=True).read([(1, 6), (3, 5)])
    assert [each.tolist() for each in found] == [[1, 10, 11, 12, 30], [11, 12]]


def test_documents_of_several_sequences_stay_so(tmp_path: Path) -> None:
    one = TokenStore(put(tmp_path, *packed([[1, 2], [3], [4]], boundaries=[0, 2, 3])))
    (tmp_path / "other").mkdir()
    two = TokenStore(put(tmp_path / "other", *packed([[5], [6, 7]], boundaries=[0, 0, 2])))
    joined = JoinedStore("both", [one, two])
    tokens, index = packed([[1, 2], [3], [4], [5], [6, 7]], boundaries=[0, 2, 3, 3, 5])
    assert [content(file) for file in joined.files] == [tokens, index]
    assert [joined.document(at).tolist() for at in range(4)] == [[1, 2, 3], [4], [], [5, 6, 7]]
    assert joined.index.document_lengths(1, 4).tolist() == [1, 0, 3]


def test_the_checks_of_a_run_see_every_shard(tmp_path: Path) -> None:
    stores = [
        write(tmp_path / f"part{at}", [[(token, True), (3, True)]] * 2, end_of_document=3, tokenizer=TOKENIZER)
        for at, token in enumerate((5, 99))
    ]
    listed = list_of(tmp_path / "list", stores)
    described = checked_description(listed)
    assert described is not None
    assert (described.documents, described.largest_id, described.tokenizer) == (4, 99, TOKENIZER)

    def check(vocab_size: int) -> str:
        data = Data(train=[Source(listed.prefix)], mask_documents=True)
        with pytest.raises(InputError) as told:
            check_data(data, Model(vocab_size=vocab_size), Scans(tmp_path / "scans"))
        return str(told.value)

    assert f"{tmp_path}/list.bin of shards holds token id 99, outside model.vocab_size = 99" in check(99)
    (tmp_path / "part1.bin").write_bytes(np.array([5, 3, 6, 3], "<u2").tobytes())
    assert f"{tmp_path}/part1.json: does not fit .bin and .idx any more" in check(100)
    for path in tmp_path.glob("*.json"):
        path.unlink()
    (tmp_path / "part1.bin").write_bytes(np.array([5, 3, 200, 3], "<u2").tobytes())
    assert "holds token id 200, outside model.vocab_size = 100" in check(100)  # without descriptions, all is read


def test_an_error_of_a_scan_names_the_file_of_the_shard(tmp_path: Path) -> None:
    listed = list_of(tmp_path / "list", [write(tmp_path / f"part{at}", [[(5 + at, True)]]) for at in (0, 1)])
    with pytest.raises(InputError, match=r"part1\.bin: token 0 is 6, outside a vocabulary of 6"):
        listed.verify(6)


def test_a_pair_comes_before_a_list(tmp_path: Path) -> None:
    part = write(tmp_path / "part", [[(1, True)]])
    list_of(tmp_path / "store", [part])
    with pytest.raises(InputError, match=r"store\.shards: exists already"):
        write(tmp_path / "store", [])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"store{suffix}").write_bytes((tmp_path / f"part{suffix}").read_bytes())
    assert open_store(tmp_path / "store").shards[0].prefix == str(tmp_path / "store")
    (tmp_path / "store.idx").unlink()
    with pytest.raises(InputError, match=r"store\.idx: no such file"):
        open_store(tmp_path / "store")
    with pytest.raises(InputError, match=r"nothing\.idx: no such file; a token store is .* list"):
        open_store(tmp_path / "nothing")


OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "mask": ({"masked": True}, "they have no mask and a mask; prepare both alike"),
    "tokenizer": (
        {"tokenizer": TokenizerFile("t.model", "cd" * 32)},
        f"SHA-256 {'ab' * 32} and the tokenizer with SHA-256 {'cd' * 32}",
    ),
    "unknown tokenizer": (
        {"tokenizer": None},
        "and no known tokenizer; prepare both alike, or tell it with megalite-inspect-data",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_stores_that_differ_are_no_list(tmp_path: Path, name: str) -> None:
    changed, told = OTHERS[name]
    stores = [
        write(tmp_path / "one", [[(1, True)]], tokenizer=TOKENIZER),
        write(tmp_path / "two", [[(1, True)]], **{"tokenizer": TOKENIZER} | changed),  # type: ignore[arg-type]
    ]
    with pytest.raises(InputError) as caught:
        list_of(tmp_path / "list", stores)
    assert f"{tmp_path}/one and {tmp_path}/two cannot be one store" in str(caught.value)
    assert told in str(caught.value)


def test_types_of_tokens_that_differ_are_no_list(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [[(1, True)]])
    with StoreWriter(tmp_path / "two", "int32") as writer:
        writer.add([1])
    with pytest.raises(InputError, match=r"one and .*two cannot be one store: they have tokens of uint16 and .* int32"):
        list_of(tmp_path / "list", [one, TokenStore(tmp_path / "two")])


def test_packed_stores_are_no_list(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, [[(1, True)]], packed=length) for name, length in (("one", None), ("two", 8)))
    with pytest.raises(InputError, match=r"two: is packed, with one token more than .* megalite-merge-data --pack 8"):
        list_of(tmp_path / "list", [one, two])
    described = checked_description(list_of(tmp_path / "alone", [two]))
    assert described is not None
    assert described.packed == 8


def test_a_shard_that_is_another_store_is_refused(tmp_path: Path) -> None:
    part = write(tmp_path / "part", [[(1, True)]])
    write_shards(tmp_path / "list", [Shard("part", 1, 2)])
    with pytest.raises(InputError, match=r"list\.shards: part had 1 document and 2 tokens, and has 1 document and 1 t"):
        open_store(tmp_path / "list")
    Path(f"{part.prefix}.bin").unlink()
    with pytest.raises(InputError, match=r"list\.shards names a store that cannot be opened: .*part\.bin: no such"):
        open_store(tmp_path / "list")


def test_many_shards_raise_the_limit_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = write(tmp_path / "part0", [[(1, True), (2, False)]], True)
    names = [f"part{number}" for number in range(40)]
    for name in names[1:]:
        for suffix in (".bin", ".idx", ".mask"):
            (tmp_path / f"{name}{suffix}").hardlink_to(f"{store.prefix}{suffix}")
    (tmp_path / "part0.json").unlink()
    write_shards(tmp_path / "list", [Shard(name, 1, 2) for name in names])
    try:
        in_use = len(os.listdir("/dev/fd"))  # earlier tests of this process may have left some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 60, before[1]))
        assert open_store(tmp_path / "list").read(0, 80).tolist() == [1, 2] * 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr("megalite.data.joined_store.resource.getrlimit", lambda _: (100, 200))
    with pytest.raises(InputError, match=r"list\.shards: 40 stores need \d+ open files, and 200 is the limit"):
        open_store(tmp_path / "list")
