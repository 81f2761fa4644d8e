"""What is said of a store beside it, and files of stores that were made to hurt."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data_store import packed, put

from megalite.base.errors import InputError
from megalite.data.description import MAX_DESCRIPTION_BYTES, Description, SourceFile, TokenizerFile
from megalite.data.store import TokenStore
from megalite.data.store_index import HEADER, MAGIC
from megalite.data.store_writer import StoreWriter

TOKENIZER = TokenizerFile("tokenizer.model", "0" * 64)
SOURCES = [SourceFile("texts/a.txt", 5), SourceFile("texts/b\udcff.txt", 0)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "store", "uint16", 2, TOKENIZER, SOURCES) as writer:
        for document in ([5, 6, 2], [2], [9, 2]):
            writer.add(document)
    return tmp_path / "store"


def test_a_store_is_described_as_it_is(prefix: Path) -> None:
    found = Description.read(prefix)
    assert found is not None
    assert (found.documents, found.tokens, found.largest_id, found.end_of_document) == (3, 6, 9, 2)
    assert (found.tokenizer, found.sources[0], found.source_files) == (TOKENIZER, SOURCES[0], 2)
    store = TokenStore(prefix)
    assert found.fingerprint == store.fingerprint()
    scan = store.verify()
    assert (scan.largest_id, scan.end_of_document) == (9, 2)


def test_a_bare_store_has_no_description(prefix: Path) -> None:
    prefix.with_suffix(".json").unlink()
    assert Description.read(prefix) is None


def changed(**fields: object) -> Callable[[dict[str, object]], object]:
    return lambda found: found | fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [1], "holds list where a JSON object is expected"),
        (lambda _: {"text": "a line of a corpus"}, "is not what megalite writes beside a store"),
        (changed(version=2, dialect=1, alphabet=2), "has version 2, with the unknown fields alphabet, dialect"),
        (changed(dialect=1), "has version 1, with the unknown fields dialect"),
        (changed(version="1"), "has version '1'; this megalite reads the number 1"),
        (changed(version=1.0), "has version 1.0; this megalite reads the number 1"),
        (changed(version=True), "has version True; this megalite reads the number 1"),
        ({"\x1b[31m": 1}.__ror__, "with the unknown fields \\x1b[31m"),
        (changed(tokens=-1), "'tokens' = -1: must be a whole number from 0"),
        (changed(tokens=True), "'tokens' = True"),
        (changed(tokens=1e3), "'tokens' = 1000.0"),
        (changed(documents=10**40), "'documents' = 1000"),
        (changed(largest_id=None), "'largest_id' = None"),
        (changed(largest_id=-1), "largest_id is -1 of 6 tokens"),
        (changed(end_of_document=10), "end_of_document is 10, above largest_id, 9"),
        (changed(end_of_document="2"), "'end_of_document' = '2'"),
        (changed(tokenizer="t.model"), "'tokenizer' = 't.model': must be an object"),
        (changed(tokenizer={"file": "t.model"}), "'tokenizer': 'sha256' is missing"),
        (changed(tokenizer={"file": 1, "sha256": "0" * 64}), "'tokenizer': 'file' = 1: must be a text"),
        (changed(fingerprint="0" * 63), "must be 64 digits from 0 to f"),
        (changed(sources=[3]), "'sources'[0] = 3: must be an object"),
        (changed(sources=[{"path": "a", "bytes": 1}] * 101), "lists 101 sources"),
        (changed(megalite="x" * 5000), "'megalite' = 'xxx"),
    ],
)
def test_a_description_is_checked_like_hostile_input(
    prefix: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    path = prefix.with_suffix(".json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError) as caught:
        Description.read(prefix)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_that_is_no_description_is_refused(prefix: Path) -> None:
    path = prefix.with_suffix(".json")
    for content in (
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"tokens": ' + b"1" * 5000 + b"}",
        b" " * (MAX_DESCRIPTION_BYTES + 1),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"store\.json"):
            Description.read(prefix)
    path.unlink()
    for make in (path.mkdir, lambda: path.symlink_to(path)):
        make()
        with pytest.raises(InputError, match=r"store\.json"):
            Description.read(prefix)
        path.rmdir() if path.is_dir() else path.unlink()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([*Description.__dataclass_fields__, "format", "version"])


@given(changes=st.dictionaries(NAMES, JSON, min_size=1, max_size=3), left_out=st.sets(NAMES, max_size=1))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_description_is_read_or_refused(prefix: Path, changes: dict[str, object], left_out: set[str]) -> None:
    path = prefix.with_suffix(".json")
    good = path.read_text()
    fields = {name: value for name, value in (json.loads(good) | changes).items() if name not in left_out}
    try:
        path.write_text(json.dumps(fields))
        found = Description.read(prefix)
    except InputError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - hypothesis tries both
    else:
        assert found is not None
        assert json.loads(found.render()) | fields == json.loads(found.render())  # nothing is read otherwise
    finally:
        path.write_text(good)


def use(prefix: Path) -> None:
    """All that may be done with a store."""
    store = TokenStore(prefix)
    store.fingerprint()
    for start in range(0, store.tokens, 3):
        found = store.begins(start, min(5, store.tokens - start))
        assert ((found > 0) & (found < 5)).all()
    for index in range(min(store.documents, 5)):
        store.document(index)
    store.verify(100)


NUMBERS = st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**60, 2**31]))


@given(st.lists(NUMBERS, max_size=6), st.lists(NUMBERS, max_size=6), st.lists(NUMBERS, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_index_is_used_or_refused(
    tmp_path: Path, lengths: list[int], offsets: list[int], boundaries: list[int]
) -> None:
    count = min(len(lengths), len(offsets))
    offsets = [0, *offsets][:count]
    ends = [0, *boundaries[1:-1], count][: len(boundaries) + 1]
    size = (offsets[-1] + 2 * (lengths[count - 1] % 2**31) if count else 0) % 200  # often as opening expects it
    index = HEADER.pack(MAGIC, 1, 8, count, len(ends))
    index += np.array([length % 2**31 for length in lengths[:count]], "<i4").tobytes()
    index += np.array(offsets, "<i8").tobytes() + np.array(ends, "<i8").tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.data.store._CHUNK", 3)
        patch.setattr("megalite.data.store_index._CHUNK", 3)
        with suppress(InputError):
            use(put(tmp_path, bytes(size), index))


@given(st.binary(min_size=1, max_size=6), st.integers(0, 121))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_changed_anywhere_in_an_index_are_lived_with_or_refused(tmp_path: Path, junk: bytes, at: int) -> None:
    tokens, index = packed([[5, 6, 7], [8], [9, 10], [0, 11, 12, 13]])
    with suppress(InputError):
        use(put(tmp_path, tokens, (index[:at] + junk + index[at + len(junk) :])[: len(index)]))


@pytest.mark.parametrize(("sequences", "boundaries"), [(2**60, 2**60), (0, 2**60), (2**64 - 1, 2**64 - 1)])
def test_an_index_that_claims_the_world_is_refused_at_once(tmp_path: Path, sequences: int, boundaries: int) -> None:
    with pytest.raises(InputError, match="expected"):
        TokenStore(put(tmp_path, b"", HEADER.pack(MAGIC, 1, 8, sequences, boundaries) + bytes(8)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=6), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_begin_where_the_index_says(
    tmp_path: Path, lengths: list[int], inner: list[int], data: st.DataObject
) -> None:
    """Sequences may be empty, and several make a document."""
    boundaries = sorted([0, *(cut for cut in inner if cut <= len(lengths)), len(lengths)])
    tokens, index = packed([[7] * length for length in lengths], boundaries=boundaries)
    store = TokenStore(put(tmp_path, tokens, index))
    starts = {sum(lengths[:cut]) for cut in boundaries}
    start = data.draw(st.integers(0, sum(lengths)))
    count = data.draw(st.integers(0, sum(lengths) - start))
    assert store.begins(start, count).tolist() == sorted(at - start for at in starts if start < at < start + count)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2])), max_size=12), st.integers(1, 5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_scan_tells_what_all_documents_end_with(tmp_path: Path, documents: list[tuple[int, int]], chunk: int) -> None:
    written = [[3] * length + [end] for length, end in documents]
    written[1:1] = [[]]  # a document without a token has no end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.data.store._CHUNK", chunk)
        scan = TokenStore(put(tmp_path, *packed(written))).verify()
    ends = {document[-1] for document in written if document}
    assert scan.end_of_document == (ends.pop() if len(ends) == 1 else None)


def test_two_writers_of_one_store_do_not_meet(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", "uint16") as first:
        first.add([1, 2])
        with (
            pytest.raises(InputError, match="store: is being written by another process"),
            StoreWriter(tmp_path / "store", "uint16"),
        ):
            pass
        first.add([3])
    assert TokenStore(tmp_path / "store").tokens == 3


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from megalite.data.store_writer import StoreWriter\n"
        "with StoreWriter(sys.argv[1], 'uint16') as writer:\n"
        "    writer.add(range(9)); writer.seal(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=False, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".store.partial.{end}" for end in ("bin", "idx", "json")
    ]
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add([1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"store.{end}" for end in ("bin", "idx", "json")]
    assert TokenStore(tmp_path / "store").tokens == 1


def test_a_store_is_not_written_into_a_file_of_two_names(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".store.partial.bin").hardlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match="has a second name"), StoreWriter(tmp_path / "store", "uint16"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_that_its_owner_publishes_meanwhile_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second writer opens the hidden file of the first, and gets its lock when the first has renamed it."""
    real, hidden = fcntl.flock, tmp_path / ".store.partial.bin"
    hidden.write_bytes(b"12345678")

    def late(descriptor: int, operation: int) -> None:
        if hidden.exists() and hidden.stat().st_size:
            hidden.rename(tmp_path / "published")
        real(descriptor, operation)

    monkeypatch.setattr("megalite.data.exclusive_file.fcntl.flock", late)
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add([1])
    assert (tmp_path / "published").read_bytes() == b"12345678"
    assert os.path.getsize(tmp_path / "store.bin") == 2


def test_a_document_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    def write() -> None:
        with StoreWriter(tmp_path / "store", "uint16") as writer:
            writer._open = 1 << 31
            writer.end_document()

    with pytest.raises(InputError, match="document 0 has 2,147,483,648 tokens"):
        write()
    assert not list(tmp_path.iterdir())
