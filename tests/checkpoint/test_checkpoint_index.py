"""The index: its bytes, and that only what covers every tensor exactly, in bytes of its own, is read."""

import json
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.store.disk import DamagedError, File, measure
from megalite.checkpoint.store.index import MAX_HEADER_BYTES, Chunk, Index, Stored, merged
from megalite.checkpoint.store.manifest import INDEX, Manifest
from megalite.checkpoint.weights.reader import Reader

WHOLE = torch.arange(24.0).reshape(4, 6)
SIZES = {"a.distcp": 64, "b.distcp": 72}
CHUNKS = [  # of WHOLE: its upper left, lower left, and right; and a scalar behind them
    Chunk("w", "float32", (4, 6), "a.distcp", 0, (0, 0), (2, 4)),
    Chunk("w", "float32", (4, 6), "a.distcp", 32, (2, 0), (2, 4)),
    Chunk("w", "float32", (4, 6), "b.distcp", 8, (0, 4), (4, 2)),
    Chunk("s", "int64", (), "b.distcp", 40, (), ()),
    Chunk("empty", "bool", (0, 3), "b.distcp", 0, (0, 0), (0, 3)),
]
VALID = Index.of(CHUNKS)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    a, b = bytearray(64), bytearray(72)
    a[:32], a[32:] = WHOLE[:2, :4].numpy().tobytes(), WHOLE[2:, :4].numpy().tobytes()
    b[8:40], b[40:48] = WHOLE[:, 4:].numpy().tobytes(), np.int64(-7).tobytes()
    (tmp_path / "a.distcp").write_bytes(a)
    (tmp_path / "b.distcp").write_bytes(b)
    return tmp_path


def reader(folder: Path, index: bytes) -> Reader:
    """Of these files, whatever `index` says; as if the manifest were right."""
    (folder / INDEX).write_bytes(index)
    files = {**{name: File(size, "") for name, size in SIZES.items()}, INDEX: measure(folder, INDEX)}
    return Reader.of_checkpoint(folder, Manifest(1, 1, "", 1, {}, {}, {}, (), files))


def test_it_comes_back() -> None:
    again = Index.decode(VALID.encode())
    assert again.files == VALID.files
    for name, stored in VALID.tensors.items():
        found = again.tensors[name]
        assert (found.dtype, found.shape) == (stored.dtype, stored.shape)
        assert np.array_equal(found.rows, stored.rows)
    again.check(SIZES, again.tensors)
    assert again.tensors["empty"].rows.shape == (0, 6)


def test_parts_of_ranks_are_one() -> None:
    one = merged(Index.of([chunk]) for chunk in CHUNKS[:3])
    assert one.files == ("a.distcp", "a.distcp", "b.distcp")
    assert one.tensors["w"].rows[:, 0].tolist() == [0, 1, 2]
    one.check(SIZES, ["w"])


def test_tensors_are_put_together(written: Path) -> None:
    found = {"w": torch.zeros(4, 6), "s": torch.tensor(0), "empty": torch.empty(0, 3, dtype=torch.bool)}
    reader(written, VALID.encode()).fill(found)
    assert found["w"].equal(WHOLE)
    assert found["s"] == -7


@pytest.mark.parametrize(("name", "shape"), [("w", (6, 4)), ("w", ()), ("s", (1,)), ("x", (4, 6))])
def test_what_is_not_there_is_not_read(name: str, shape: tuple[int, ...], written: Path) -> None:
    with pytest.raises(DamagedError, match=f"{INDEX} (has|lacks) {name}"):
        reader(written, VALID.encode()).fill({name: torch.empty(shape)})


def test_rows_larger_than_a_block_and_other_dtypes(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 9, 17):
        monkeypatch.setattr("megalite.checkpoint.weights.read.BLOCK", block)
        found = torch.zeros(4, 6, dtype=torch.float64)
        reader(written, VALID.encode()).fill({"w": found})
        assert found.equal(WHOLE.double())


boxes = st.tuples(st.integers(-1, 3), st.integers(-1, 4))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=3), st.data())
def test_chunks_cover_a_tensor_exactly_or_are_refused(shape: list[int], data: st.DataObject) -> None:
    """Beside counting every element."""
    chunks = data.draw(st.lists(st.tuples(*[boxes] * len(shape)), max_size=4))
    if data.draw(st.booleans()) and shape and shape[0] > 1 and 0 not in shape:  # often a cover
        cut = data.draw(st.integers(1, shape[0] - 1))
        rest = [(0, size) for size in shape[1:]]
        chunks = [((0, cut), *rest), ((cut, shape[0] - cut), *rest), *chunks[: data.draw(st.integers(0, 1))]]
    ends = [(at, size, whole) for box in chunks for (at, size), whole in zip(box, shape, strict=True)]
    inside = all(at >= 0 and size > 0 and at + size <= whole for at, size, whole in ends)
    counts = np.zeros(shape, int)
    for box in chunks if inside else []:
        counts[tuple(slice(at, at + size) for at, size in box)] += 1
    position, rows = 0, []
    for box in chunks:
        rows.append([0, position, *(at for at, _ in box), *(size for _, size in box)])
        position += int(np.prod([max(1, size) for _, size in box]))
    table = np.array(rows, np.int64).reshape(-1, 2 + 2 * len(shape))
    index = Index(("a.distcp",), {"t": Stored("uint8", tuple(shape), table)})
    try:
        index.check({"a.distcp": 10_000}, ["t"])
    except ValueError:
        assert not inside or (counts != 1).any()
    else:
        assert inside
        assert (counts == 1).all()


def change_row(number: int, column: int, value: int) -> Callable[[], bytes]:
    def changed() -> bytes:
        index = Index.decode(VALID.encode())
        rows = index.tensors["w"].rows.copy()
        rows[number, column] = value
        return Index(index.files, {**index.tensors, "w": Stored("float32", (4, 6), rows)}).encode()

    return changed


def change_header(**changes: Any) -> Callable[[], bytes]:
    def changed() -> bytes:
        data = VALID.encode()
        (length,) = struct.unpack_from("<Q", data)
        fields = json.loads(data[8 : 8 + length])
        for key, value in changes.items():
            where, _, inner = key.partition("_")
            fields[where] = value if not inner else {**fields[where], "w": {**fields[where]["w"], inner: value}}
        header = json.dumps(fields).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + length :]

    return changed


WRONG = {
    "another file": change_row(0, 0, 1),
    "no such file": change_row(0, 0, 2),
    "a file below the first": change_row(0, 0, -1),
    "before the file": change_row(0, 1, -4),
    "over the end": change_row(1, 1, 33),
    "far over the end": change_row(1, 1, 2**63 - 4),
    "bytes of another chunk": change_row(1, 1, 0),
    "bytes of half another chunk": change_row(1, 1, 16),
    "an overlap": change_row(1, 2, 1),
    "outside": change_row(1, 2, 3),
    "a negative offset": change_row(0, 2, -1),
    "smaller": change_row(1, 4, 1),
    "negative": change_row(1, 4, -2),
    "overflowing": change_row(1, 4, 2**62),
    "wider elements": change_header(tensors_dtype="float64"),
    "no such elements": change_header(tensors_dtype="object"),
    "elements of a list": change_header(tensors_dtype=["float32"]),
    "another shape": change_header(tensors_shape=[6, 4]),
    "a larger shape": change_header(tensors_shape=[4, 7]),
    "a shape without end": change_header(tensors_shape=[2**40, 2**40]),
    "a negative shape": change_header(tensors_shape=[-4, -6]),
    "a shape of texts": change_header(tensors_shape=["4", "6"]),
    "a shape of truths": change_header(tensors_shape=[True, True]),
    "a deep shape": change_header(tensors_shape=[1] * 30),
    "a shape that is a text": change_header(tensors_shape="ab"),
    "fewer chunks": change_header(tensors_chunks=2),
    "more chunks": change_header(tensors_chunks=4),
    "endless chunks": change_header(tensors_chunks=2**62),
    "negative chunks": change_header(tensors_chunks=-3),
    "chunks of a fraction": change_header(tensors_chunks=3.0),
    "one more field": change_header(tensors_weather="fine"),
    "no tensors": change_header(tensors=[]),
    "a file elsewhere": change_header(files=["../a.distcp", "b.distcp"]),
    "a file by its path": change_header(files=["/etc/passwd", "b.distcp"]),
    "a file that the manifest lacks": change_header(files=["c.distcp", "b.distcp"]),
    "files that are numbers": change_header(files=[0, 1]),
    "files in a text": change_header(files="ab"),
    "nothing": lambda: b"",
    "no table": lambda: VALID.encode()[:-8],
    "one byte more": lambda: VALID.encode() + b"\0",
    "a header without end": lambda: b"\xff" * 8 + VALID.encode()[8:],
    "a deep header": lambda: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a header of lists": lambda: struct.pack("<Q", 12 << 20) + b"[" + b"[]," * (4 << 20),
    "a header that is too long": lambda: (
        struct.pack("<Q", MAX_HEADER_BYTES + 8) + b"{}" + b" " * (MAX_HEADER_BYTES + 6)
    ),
    "a name of two lines": change_header(tensors={"w\n": {"dtype": "bool", "shape": [0], "chunks": 0}}),
    "a number of 5000 digits": lambda: struct.pack("<Q", 5000) + b"9" * 5000,
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_index_is_damage(how: str, written: Path) -> None:
    found = torch.zeros(4, 6)
    with pytest.raises(DamagedError, match=INDEX):
        reader(written, WRONG[how]()).fill({"w": found})
    assert not found.any(), "nothing is read before all is checked"


@pytest.mark.timeout(20)
def test_tensors_that_no_index_can_hold_are_refused() -> None:
    """Those of many dimensions would have 2^dimensions corners."""
    deep = Chunk("w", "float32", (1,) * 40, "a.distcp", 0, (0,) * 40, (1,) * 40)
    rows = np.array([[0, 0, *deep.offsets, *deep.sizes]], np.int64)
    for make in (
        lambda: Index.of([deep]),
        lambda: Index(("a.distcp",), {"w": Stored("float32", (1,) * 40, rows)}).check(SIZES, ["w"]),
    ):
        with pytest.raises(ValueError, match="has w of 40 dimensions; tensors have at most 4"):
            make()
    for other in (deep._replace(shape=(1,) * 3), CHUNKS[0]._replace(dtype="float64"), CHUNKS[0]._replace(sizes=(2,))):
        with pytest.raises(ValueError, match="has parts of w that do not belong together"):
            Index.of([CHUNKS[0], other])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_changes_are_harmless(data: st.DataObject) -> None:
    """Either refused, or of the same shape and read from where it may be read."""
    raw = bytearray(VALID.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        index = Index.decode(bytes(raw))
        index.check(SIZES, index.tensors)
    except ValueError:
        return
    assert sum(stored.bytes for stored in index.tensors.values()) <= sum(SIZES.values())


def test_a_large_index_is_sane_in_size() -> None:
    """A matrix of Llama 3.1 405B on 1,024 ranks that share it: 48 bytes each."""
    grid = [
        Chunk("w", "float32", (16384, 53248), f"__{i}_{j}.distcp", 0, (i * 128, j * 6656), (128, 6656))
        for i, j in product(range(128), range(8))
    ]
    index = Index.of(grid)
    index.check(dict.fromkeys(index.files, 128 * 6656 * 4), ["w"])
    assert len(index.tensors["w"].rows.tobytes()) == 48 * 1024
