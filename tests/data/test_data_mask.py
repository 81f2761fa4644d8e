"""The mask of trained tokens beside a store: written, read, and refused where it does not belong."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.schema import Data, Source
from megalite.data.check import Scans, check_data
from megalite.data.description import Description
from megalite.data.store import Scan, TokenStore
from megalite.data.store_writer import StoreWriter

PIECES = st.lists(st.lists(st.booleans(), max_size=19), min_size=1, max_size=6)
TRAINED = [True, False, False, True, True, False, True, False, False, True, True]  # two bytes


def write(prefix: Path, pieces: list[list[bool]], masked: bool = True) -> Path:
    """A store of one document, given in pieces."""
    with StoreWriter(prefix, "uint16", masked=masked) as writer:
        for bits in pieces:
            writer.extend(range(1, len(bits) + 1), bits if masked else None)
        writer.end_document()
    return prefix


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store", [TRAINED])


def check(folder: Path, prefix: Path) -> None:
    scans = Scans(folder / "data.json")
    check_data(Data(train=[Source(str(prefix))]), Model(vocab_size=100), scans)
    scans.keep()


def refused(folder: Path, prefix: Path) -> str:
    with pytest.raises(InputError) as told:
        check(folder, prefix)
    return str(told.value)


@given(PIECES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_bit_comes_back(tmp_path: Path, pieces: list[list[bool]]) -> None:
    bits = [bit for piece in pieces for bit in piece]
    for left in tmp_path.iterdir():
        left.unlink()
    store = TokenStore(write(tmp_path / "store", pieces))
    for start in range(len(bits) + 1):
        assert all(
            store.trained(start, count).tolist() == bits[start : start + count]
            for count in range(len(bits) - start + 1)
        )
    number = sum(bit << at for at, bit in enumerate(bits))
    assert (tmp_path / "store.mask").read_bytes() == number.to_bytes(-(-len(bits) // 8), "little")
    assert store.verify().trained_tokens == sum(bits)
    assert json.loads((tmp_path / "store.json").read_text())["trained_tokens"] == sum(bits)


def test_a_store_without_a_mask_is_as_it_was(tmp_path: Path, store: Path) -> None:
    plain = write(tmp_path / "plain", [TRAINED], masked=False)
    assert not (tmp_path / "plain.mask").exists()
    assert "trained_tokens" not in (tmp_path / "plain.json").read_text()
    for end in (".bin", ".idx"):
        assert plain.with_suffix(end).read_bytes() == store.with_suffix(end).read_bytes()
    found = TokenStore(plain)
    assert found.trained(2, 5).tolist() == [True] * 5
    assert found.verify() == Scan(11, 11)


@pytest.mark.parametrize("told", [None, -1, 12, "3", True])
def test_a_count_that_no_mask_has_is_refused(store: Path, told: object) -> None:
    path = store.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trained_tokens": told}))
    with pytest.raises(InputError, match="trained_tokens"):
        Description.read(store)


def test_masks_make_stores_differ(tmp_path: Path, store: Path) -> None:
    other = write(tmp_path / "other", [[not bit for bit in TRAINED]])
    plain = write(tmp_path / "plain", [TRAINED], masked=False)
    assert len({TokenStore(each).fingerprint() for each in (store, other, plain)}) == 3


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x59", "1 bytes, expected 2 for 11 tokens"),
        (b"\x59\x06\x00", "3 bytes, expected 2 for 11 tokens"),
        (b"\x59\x0e", "last byte 0x0e, expected 0 in the bits after token 10"),
    ],
)
def test_a_mask_that_is_not_of_the_store_is_refused(store: Path, content: bytes, found: str) -> None:
    path = store.with_suffix(".mask")
    assert path.read_bytes() == b"\x59\x06"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"store.mask: found {found}; the mask is damaged"):
        TokenStore(store)


def test_what_is_no_file_is_no_mask(store: Path) -> None:
    store.with_suffix(".mask").unlink()
    store.with_suffix(".mask").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"store\.mask: not a regular file"):
        TokenStore(store)


def test_training_refuses_a_mask_that_is_lost_changed_or_added(tmp_path: Path, store: Path) -> None:
    check(tmp_path, store)
    mask = store.with_suffix(".mask")
    mask.write_bytes(b"\x58\x06")
    assert "does not fit .bin, .idx and .mask any more" in refused(tmp_path, store)
    mask.unlink()
    assert "which tokens are trained is in store.mask, which is not there; copy that file" in refused(tmp_path, store)
    plain = write(tmp_path / "plain", [TRAINED], masked=False)
    plain.with_suffix(".mask").write_bytes(b"\x59\x06")
    assert "does not fit .bin, .idx and .mask any more" in refused(tmp_path, plain)


@pytest.mark.parametrize("described", [True, False])
def test_training_refuses_a_store_without_a_trained_token(tmp_path: Path, described: bool) -> None:
    store = write(tmp_path / "store", [[False] * 11])
    if not described:
        store.with_suffix(".json").unlink()
    for _ in range(2):  # the second time by what is remembered
        assert "store.mask says that no token is trained" in refused(tmp_path, store)


def test_tokens_and_bits_go_together(tmp_path: Path) -> None:
    def extend(masked: bool, bits: list[bool] | None) -> None:
        with StoreWriter(tmp_path / "store", "uint16", masked=masked) as writer:
            writer.extend([1, 2], bits)

    for masked, bits in ((True, None), (True, [True]), (False, [True, True])):
        with pytest.raises(ValueError, match="mask"):
            extend(masked, bits)
    assert not list(tmp_path.iterdir())


def test_a_mask_that_lies_around_is_not_taken_on(tmp_path: Path) -> None:
    (tmp_path / "store.mask").write_bytes(b"\x59\x06")
    with pytest.raises(InputError, match=r"store\.mask: exists already"):
        write(tmp_path / "store", [TRAINED], masked=False)


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from megalite.data.store_writer import StoreWriter\n"
        "with StoreWriter(sys.argv[1], 'uint16', masked=True) as writer:\n"
        "    writer.add(range(9), [True] * 9); writer.seal(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx", ".json", ".mask"}
    write(tmp_path / "store", [TRAINED], masked=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"store.{end}" for end in ("bin", "idx", "json")]
    assert TokenStore(tmp_path / "store").mask is None
    assert np.array_equal(TokenStore(tmp_path / "store").read(0, 11), np.arange(1, 12))
