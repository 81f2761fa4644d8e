"""Every expected byte here is packed by hand from the format, independently of the code under test."""

import errno
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.base.errors import InputError
from megalite.data.store import Scan, TokenStore, token_dtype
from megalite.data.store_writer import StoreWriter

DOCUMENTS = [[5, 6, 7], [8], [9, 10], [65_499, 0, 11, 12]]
CODES = {"<u2": (8, "H"), "<i4": (4, "i")}


def packed(documents: list[list[int]], dtype: str = "<u2", boundaries: list[int] | None = None) -> tuple[bytes, bytes]:
    """The .bin and the .idx; by default every document is one sequence."""
    code, letter = CODES[dtype]
    lengths = [len(document) for document in documents]
    offsets = [sum(lengths[:i]) * struct.calcsize("<" + letter) for i in range(len(lengths))]
    boundaries = boundaries or list(range(len(documents) + 1))
    tokens = [token for document in documents for token in document]
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    return struct.pack(f"<{len(tokens)}{letter}", *tokens), index


def put(folder: Path, tokens: bytes, index: bytes) -> Path:
    prefix = folder / "store"
    prefix.with_name("store.bin").write_bytes(tokens)
    prefix.with_name("store.idx").write_bytes(index)
    return prefix


@pytest.mark.parametrize("dtype", CODES)
def test_writes_the_format(tmp_path: Path, dtype: str) -> None:
    with StoreWriter(tmp_path / "new.v1", dtype) as writer:
        for document in DOCUMENTS:
            writer.add(document)
        assert not (tmp_path / "new.v1.bin").exists()
    tokens, index = packed(DOCUMENTS, dtype)
    assert (tmp_path / "new.v1.bin").read_bytes() == tokens
    assert (tmp_path / "new.v1.idx").read_bytes() == index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.v1.bin", "new.v1.idx", "new.v1.json"]
    assert (writer.documents, writer.tokens) == (4, 10)


def test_four_documents_have_the_known_sizes(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "four", "uint16") as writer:
        for length in (10, 20, 30, 40):
            writer.add(np.arange(length))
    assert (tmp_path / "four.bin").stat().st_size == 200
    assert (tmp_path / "four.idx").stat().st_size == 122


@pytest.mark.parametrize("dtype", CODES)
def test_reads_the_format(tmp_path: Path, dtype: str) -> None:
    store = TokenStore(put(tmp_path, *packed(DOCUMENTS, dtype, boundaries=[0, 1, 1, 4])))
    assert (store.tokens, store.sequences, store.documents) == (10, 4, 3)
    assert store.dtype == np.dtype(dtype)
    assert store.lengths.tolist() == [3, 1, 2, 4]
    assert store.read(2, 5).tolist() == [7, 8, 9, 10, 65_499]
    assert [store.document(i).tolist() for i in range(3)] == [[5, 6, 7], [], [8, 9, 10, 65_499, 0, 11, 12]]
    assert store.verify(vocab_size=65_500) == Scan(65_499, None)


def test_an_empty_store_is_valid(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "empty", "uint16"):
        pass
    store = TokenStore(tmp_path / "empty")
    assert (store.tokens, store.documents, store.verify()) == (0, 0, Scan(-1, None))
    assert (tmp_path / "empty.idx").read_bytes() == packed([])[1]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (9, 2), (10, 1), (0, -1)])
def test_reading_outside_is_an_error(tmp_path: Path, start: int, count: int) -> None:
    with pytest.raises(ValueError, match="of a store of 10"):
        TokenStore(put(tmp_path, *packed(DOCUMENTS))).read(start, count)


def patch(index: bytes, offset: int, form: str, value: int) -> bytes:
    """The index with the number at `offset` replaced."""
    raw = struct.pack(form, value)
    return index[:offset] + raw + index[offset + len(raw) :]


# Four sequences: lengths from 34, offsets from 50, boundaries from 82, end at 122.
CORRUPTIONS: dict[str, tuple[Callable[[bytes, bytes], tuple[bytes, bytes]], str]] = {
    "bin truncated by one token": (lambda b, i: (b[:-2], i), r"store\.bin: found 18 bytes, expected 20"),
    "bin truncated inside a token": (lambda b, i: (b[:-1], i), r"store\.bin: found 19 bytes, expected 20"),
    "bin too long": (lambda b, i: (b + b"\0\0", i), r"store\.bin: found 22 bytes, expected 20"),
    "idx truncated": (lambda b, i: (b, i[:-8]), r"store\.idx: found 114 bytes, expected 122"),
    "idx too long": (lambda b, i: (b, i + b"\0"), r"store\.idx: found 123 bytes, expected 122"),
    "idx without a header": (lambda b, i: (b, i[:33]), r"store\.idx: found 33 bytes, expected a header of 34"),
    "magic": (lambda b, i: (b, b"TNTIDX" + i[6:]), r"found magic b'TNTIDX.*not a Megatron index"),
    "version": (lambda b, i: (b, patch(i, 9, "<Q", 2)), "found version 2, expected version 1"),
    "a float dtype": (lambda b, i: (b, patch(i, 17, "<B", 7)), "found dtype code 7, expected an integer type"),
    "a wider dtype": (lambda b, i: (b, patch(i, 17, "<B", 4)), "found 20 bytes, expected 28"),
    "sequence count": (lambda b, i: (b, patch(i, 18, "<Q", 5)), "found 122 bytes, expected 134 for 5 sequences"),
    "huge sequence count": (lambda b, i: (b, patch(i, 18, "<Q", 2**63)), "found 122 bytes, expected"),
    "boundary count": (lambda b, i: (b, patch(i, 26, "<Q", 4)), "expected 114 for 4 sequences and 4 document"),
    "no boundary": (lambda b, i: (b, patch(i[:-40], 26, "<Q", 0)), "found 0 document boundaries"),
    "first boundary": (lambda b, i: (b, patch(i, 82, "<q", 1)), "found document boundaries 1 to 4, expected 0 to 4"),
    "last boundary": (lambda b, i: (b, patch(i, 114, "<q", 3)), "found document boundaries 0 to 3, expected 0 to 4"),
    "first offset": (lambda b, i: (b, patch(i, 50, "<q", 2)), "found first offset 2, expected 0"),
    "last length": (lambda b, i: (b, patch(i, 46, "<i", 5)), "found 20 bytes, expected 22"),
    "not a multiple": (lambda b, i: (b + b"\0", patch(i, 74, "<q", 13)), "found 21 bytes, expected a multiple of 2"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_opening_a_damaged_store_is_an_error(tmp_path: Path, name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    prefix = put(tmp_path, *corrupt(*packed(DOCUMENTS)))
    with pytest.raises(InputError, match=message):
        TokenStore(prefix)


@pytest.mark.parametrize("missing", ["store.bin", "store.idx"])
def test_a_missing_file_is_an_error(tmp_path: Path, missing: str) -> None:
    prefix = put(tmp_path, *packed(DOCUMENTS))
    (tmp_path / missing).unlink()
    with pytest.raises(InputError, match=f"{missing}: no such file"):
        TokenStore(prefix)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (38, "<i", 2, "found offset 8 of sequence 2, expected 10"),
        (38, "<i", -1, "found length -1 of sequence 1, expected 0 or more"),
        (58, "<q", 8, "found offset 8 of sequence 1, expected 6"),
        (98, "<q", 5, "found document 2 from sequence 5 to 3"),
    ],
)
def test_verify_finds_what_opening_does_not_read(
    tmp_path: Path, offset: int, form: str, value: int, message: str
) -> None:
    tokens, index = packed(DOCUMENTS)
    store = TokenStore(put(tmp_path, tokens, patch(index, offset, form, value)))
    with pytest.raises(InputError, match=message):
        store.verify()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_verify_checks_ids_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("megalite.data.store._CHUNK", chunk)
    store = TokenStore(put(tmp_path, *packed(DOCUMENTS)))
    assert store.verify() == Scan(65_499, None)
    with pytest.raises(InputError, match=r"store\.bin: token 6 is 65499, outside a vocabulary of 65499"):
        store.verify(vocab_size=65_499)
    negative = TokenStore(put(tmp_path, *packed([[1, 2], [3, -4]], "<i4")))
    with pytest.raises(InputError, match="token 3 is -4"):
        negative.verify()


def test_any_flipped_bit_of_header_lengths_and_offsets_is_found(tmp_path: Path) -> None:
    tokens, index = packed(DOCUMENTS)
    for bit in range(82 * 8):
        flipped = bytearray(index)
        flipped[bit // 8] ^= 1 << bit % 8
        prefix = put(tmp_path, tokens, bytes(flipped))
        with pytest.raises(InputError):
            TokenStore(prefix).verify()


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), StoreWriter(tmp_path / "store", "uint16") as writer:  # noqa: PT012
        writer.add(np.arange(100_000) % 100)
        writer.seal()
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())


def test_an_existing_store_is_never_replaced(tmp_path: Path) -> None:
    prefix = put(tmp_path, *packed(DOCUMENTS))
    with pytest.raises(InputError, match=r"store\.bin: exists already"), StoreWriter(prefix, "uint16"):
        pass
    assert TokenStore(prefix).tokens == 10


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 65_536), ("uint16", -1), ("int32", 2**31)])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, dtype: str, token: int) -> None:
    with pytest.raises(ValueError, match="in a store of"), StoreWriter(tmp_path / "store", dtype) as writer:
        writer.add(np.array([1, token]))
    assert not list(tmp_path.iterdir())


def test_a_file_that_may_not_grow_is_a_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with (
            pytest.raises(InputError, match="cannot write the store: File too large"),
            StoreWriter(tmp_path / "store", "int32") as writer,
        ):
            writer.add(np.arange(400_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_at_the_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megalite.data.store_writer.os.fsync", full)
    with (
        pytest.raises(InputError, match="store: cannot write the store: No space left"),
        StoreWriter(tmp_path / "store", "int32") as writer,
    ):
        writer.add([1, 2, 3])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["bin", "idx", "json"])
def test_a_folder_in_the_place_of_a_hidden_file_is_a_clear_error(tmp_path: Path, end: str) -> None:
    (tmp_path / f".store.partial.{end}").mkdir()
    with (
        pytest.raises(InputError, match="store: cannot write the store: Is a directory"),
        StoreWriter(tmp_path / "store", "uint16") as writer,
    ):
        writer.add([1])
    assert [path.name for path in tmp_path.iterdir()] == [f".store.partial.{end}"]


def test_pipes_and_links_in_the_place_of_hidden_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".store.partial.json")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".store.partial.idx").symlink_to(tmp_path / "precious")
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add([1])
    assert TokenStore(tmp_path / "store").tokens == 1
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write the store"), StoreWriter(tmp_path / "file" / "store", "int32"):
        pass


def test_a_name_ending_in_a_slash_names_no_hidden_file(tmp_path: Path) -> None:
    with StoreWriter(f"{tmp_path}/store/", "uint16") as writer:
        writer.add([1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.bin", "store.idx", "store.json"]
    with pytest.raises(InputError, match="not a name for a token store"):
        StoreWriter("/", "uint16")


def test_a_file_that_cannot_be_mapped_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    prefix = put(tmp_path, *packed(DOCUMENTS))
    monkeypatch.setattr("megalite.data.store.np.memmap", refuse)
    with pytest.raises(InputError, match=r"store: cannot read the token store: .*Permission denied"):
        TokenStore(prefix)


@pytest.mark.parametrize(("vocab_size", "name"), [(256, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_token_dtype(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name
