"""Safetensors files are written as the library writes them, and hostile ones are refused by name."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from megalite.base.errors import InputError
from megalite.checkpoint.weights.formats.safetensors import DTYPES, INDEX, METADATA, ONE_FILE, find, header
from megalite.checkpoint.weights.reader import Reader

library = pytest.importorskip("safetensors.torch")

shapes = some.lists(some.integers(0, 4), max_size=3).map(tuple)
named = some.dictionaries(some.text(min_size=1, max_size=8), some.tuples(some.sampled_from([*DTYPES.values()]), shapes))


@given(named)
def test_a_file_is_the_same_to_the_byte_as_the_library_s(forms: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    forms = {name: form for name, form in forms.items() if name != "__metadata__"}
    tensors = {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in forms.items()}
    start, order = header(forms)
    content = b"".join(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in order)
    assert start + content == library.save(tensors, metadata=METADATA)


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(i, 3, generator=generator).to(torch.bfloat16) for i in range(4)} | {
        "scalar": torch.tensor(7.0)
    }
    library.save_file(tensors, tmp_path / ONE_FILE)
    files = find(tmp_path)
    reader = Reader(tmp_path, files.index, files.sizes, files.source)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    reader.fill(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_files_may_be_links_as_in_the_cache_of_a_hub(tmp_path: Path) -> None:
    library.save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / ONE_FILE).symlink_to("../blob")
    assert set(find(tmp_path / "snapshot").index.tensors) == {"a"}


def raw(fields: Any, content: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def tensor(dtype: Any = "F32", shape: Any = (2,), ends: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": ends}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has 0 bytes, too few"),
        (raw({"a": tensor()}, length=1 << 62), "has a header of 4,611,686,018,427,387,904 bytes"),
        (raw({"a": tensor()})[:-1], "was cut or is still being written"),
        (raw({"a": tensor()}) + b"x", "instead of"),
        (raw(b"{"), "Expecting"),
        (raw(b"[" * 100_000), "nested too deep|more than"),
        (raw([1]), "has no header of safetensors"),
        (raw({"a": 7}), "describes 'a' in another way"),
        (raw({"a": tensor(shape="2")}), "describes 'a' in another way|no tensor has"),
        (raw({"a": tensor(shape=[-2])}), "sizes of 'a' that no tensor has"),
        (raw({"a": tensor(shape=[True, 2])}), "sizes of 'a' that no tensor has"),
        (raw({"a": tensor(shape=[1 << 60])}), "sizes of 'a' that no tensor has"),
        (raw({"a": tensor(dtype="F8_E4M3")}), "a quantized model must be turned into one of these first"),
        (raw({"a": tensor(dtype=["F32"])}), "describes 'a' in another way|known are"),
        (raw({"a": tensor(shape=[3])}), "has 8 bytes of 'a' F32"),
        (raw({"a": tensor(ends=[8, 16])}), "a gap or an overlap before 'a'"),
        (raw({"a": tensor(shape=[1] * 60_000)}), "has 'a' of 60,000 dimensions; tensors have at most 4$"),
        (
            raw(b'{"a": {"dtype": "F32", "shape": [7], "shape": [2], "data_offsets": [0, 8]}}'),
            "has the key shape twice",
        ),
        (raw(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 7}'), "has the key a twice"),
        (raw({"a": tensor(), "b": tensor()}), "a gap or an overlap before"),
        (raw({"a" * 2000: tensor()}), "names have at most 1000"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / ONE_FILE).write_bytes(content)
    with pytest.raises(InputError, match=told) as raised:
        find(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "which is no file of this folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is no file of this folder"),
        ({"weight_map": {"a": 7}}, "which is no file of this folder"),
        ({"weight_map": {}}, "names no files"),
        ({"weight_map": 7}, "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "x.safetensors"}}, "x.safetensors is missing"),
        ({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}, "has other tensors than .* b for example"),
    ],
)
def test_an_index_that_lies_is_refused(index: Any, told: str, tmp_path: Path) -> None:
    library.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=told):
        find(tmp_path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pipe"}}))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is no regular file"):
        find(tmp_path)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"convert its pytorch_model.bin to safetensors first"):
        find(tmp_path)
