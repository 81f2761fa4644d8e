"""Where elements lie in what `torch.save` has written; anything else is refused in little time and memory."""

import io
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.checkpoint.store.archive import MAX_READ_BYTES, Archive

TENSOR = torch.arange(5.0)
DIRECTORY, END, END64, LOCATOR = b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"


def saved() -> bytes:
    file = io.BytesIO()
    torch.save(TENSOR, file)
    return file.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[io.BufferedRandom]:
    with (tmp_path / "__0_0.distcp").open("w+b", buffering=0) as opened:
        yield opened  # type: ignore[misc]


def test_elements_are_found_and_small_records_read(file: io.BufferedRandom) -> None:
    file.write(b"before" + saved() + b"behind")
    archive = Archive(file.fileno(), 6, len(saved()))
    position, size = archive.locate("data/0")
    assert os.pread(file.fileno(), size, position) == TENSOR.numpy().tobytes()
    assert archive.read("byteorder") == b"little"
    assert archive.holds("data/0")
    assert not archive.holds("data/1")


def zipped(*records: tuple[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", how) as archive:
        warnings.simplefilter("ignore")  # of two of one name
        for name, content in records:
            archive.writestr(name, content)
    return file.getvalue()


def changed(form: str, value: int, behind: int, of: bytes = DIRECTORY, content: bytes | None = None) -> bytes:
    """`value` in a field that lies `behind` the first mark `of`."""
    data = bytearray(zipped(("a/data/0", bytes(20))) if content is None else content)
    struct.pack_into(form, data, data.index(of) + behind, value)
    return bytes(data)


def zip64(offset: int = 0, directory: tuple[int, int] | None = None) -> bytes:
    """Of one record, whose header is at `offset`, or with another length and position of the directory, in 64 bits."""
    data = zipped(("a/data/0", bytes(20)))
    at, end = data.index(DIRECTORY), data.index(END)
    entry = bytearray(data[at:end]) + struct.pack("<HHQ", 1, 8, offset)
    struct.pack_into("<H", entry, 30, 12)  # bytes of that
    struct.pack_into("<I", entry, 42, 0xFFFF_FFFF)
    length, position = directory or (len(entry), at)
    record = END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, length, position)
    return data[:at] + entry + record + LOCATOR + struct.pack("<IQI", 0, at + len(entry), 1) + data[end:]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a header beyond 2**63": lambda: zip64((1 << 63) + 5),
    "a header at 2**63 - 1": lambda: zip64((1 << 63) - 1),
    "a header at the end": lambda: zip64(150),
    "a directory of 2**64 - 1 bytes": lambda: zip64(directory=((1 << 64) - 1, 0)),
    "a directory of 2**62 bytes": lambda: zip64(directory=(1 << 62, 0)),
    "a directory at 2**63": lambda: zip64(directory=(58, 1 << 63)),
    "a directory of 4 GiB": lambda: changed("<I", 0xFFFF_FFFE, 12, END),
    "two records of one name": lambda: zipped(("a/data/0", b"1" * 20), ("a/data/0", b"2" * 20)),
    "two records that torch takes for one": lambda: zipped(("a/data/0", b"1" * 20), ("b/data/0", b"2" * 20)),
    "two records up to a null byte": lambda: zipped(("a/data/0", b"1" * 20), ("a/data/0xx", b"")).replace(
        b"0xx", b"0\0x"
    ),
    "compressed": lambda: zipped(("a/data/0", bytes(20)), how=zipfile.ZIP_DEFLATED),
    "encrypted": lambda: changed("<H", 1, 8),
    "more bytes than there are": lambda: changed("<I", 1 << 30, 24, content=changed("<I", 1 << 30, 20)),
    "a name that is no text": lambda: changed("<H", 1 << 11, 8).replace(b"a/data/0", b"a/\xff\xff\xff\xff/0"),
    "a later version": lambda: changed("<H", 999, 6),
    "no record": zipped,
    "another record": lambda: zipped(("a/data/1", bytes(20))),
    "zeros": lambda: bytes(200),
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_what_torch_has_not_saved_is_refused(how: str, file: io.BufferedRandom) -> None:
    content = HOSTILE[how]()
    file.write(content)
    with pytest.raises(ValueError, match=r"^(is no tensor that torch|has (no|two|a) record)"):
        Archive(file.fileno(), 0, len(content)).locate("data/0")


def test_the_zip64_that_is_damaged_above_is_none_by_itself(file: io.BufferedRandom) -> None:
    file.write(zip64())
    assert Archive(file.fileno(), 0, len(zip64())).locate("data/0") == (38, 20)


def test_little_is_read_of_a_large_file(file: io.BufferedRandom) -> None:
    os.truncate(file.fileno(), 1 << 42)
    with pytest.raises(ValueError, match="is no tensor that torch has saved"):
        Archive(file.fileno(), 0, 1 << 42)
    end = changed("<I", 0xF000_0000, 12, END)
    os.pwrite(file.fileno(), end[end.index(END) :], (1 << 42) - 22)
    with pytest.raises(ValueError, match=f"it has a directory of {0xF000_0000} bytes"):
        Archive(file.fileno(), 0, 1 << 42)
    with pytest.raises(ValueError, match="ends before the"):
        Archive(file.fileno(), 1, 1 << 42)
    assert MAX_READ_BYTES == 1 << 20


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_changes_are_refused_or_stay_inside(data: st.DataObject, file: io.BufferedRandom) -> None:
    raw = bytearray(data.draw(st.sampled_from([saved(), zip64()])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len(raw) - 300 if len(raw) > 300 else 0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    os.pwrite(file.fileno(), raw, 0)
    os.truncate(file.fileno(), len(raw))
    try:
        position, size = Archive(file.fileno(), 0, len(raw)).locate("data/0")
    except ValueError:
        return
    assert 0 <= position <= position + size <= len(raw)
