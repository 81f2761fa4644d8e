"""A cache that several processes share, and in which nothing wrong is ever read."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megalite.base.errors import InputError
from megalite.data.block_cache import BLOCK_BYTES, ENTRY_BYTES, WAYS, BlockCache

SIZE = 2 * WAYS * (BLOCK_BYTES + ENTRY_BYTES)
WRITER = f"""
import sys
import numpy as np
from pathlib import Path
from megalite.data.block_cache import BLOCK_BYTES, BlockCache
cache, into = BlockCache(Path(sys.argv[1]), {SIZE}), bytearray(BLOCK_BYTES)
random = np.random.default_rng(int(sys.argv[2]))
print("ready", flush=True)
while True:
    key = int(random.integers(1, 64))
    if cache.read(key, memoryview(into)):
        assert into == key.to_bytes(4, "little") * (BLOCK_BYTES // 4), key
    cache.write(key, memoryview(key.to_bytes(4, "little") * (BLOCK_BYTES // 4)))
"""


def block(key: int) -> memoryview:
    return memoryview(key.to_bytes(4, "little") * (BLOCK_BYTES // 4))


def found(cache: BlockCache, key: int) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    return bytes(into) if cache.read(key, memoryview(into)) else None


def test_blocks_come_back_until_others_need_their_place(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, SIZE)
    assert found(cache, 1) is None
    for key in range(1, 2 * WAYS + 1):
        cache.write(key, block(key))
    assert [found(cache, key) for key in range(1, 2 * WAYS + 1)] == [
        bytes(block(key)) for key in range(1, 2 * WAYS + 1)
    ]
    cache.write(100, block(100))
    again = BlockCache(tmp_path, SIZE)
    assert found(again, 100) == bytes(block(100))
    assert sum(found(again, key) is None for key in range(1, 2 * WAYS + 1)) == 1
    assert cache.path.stat().st_size == SIZE


def test_a_block_of_which_a_byte_differs_is_absent(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, SIZE)
    cache.write(3, block(3))
    content = np.memmap(cache.path, "u1", "r+")
    (at,) = np.flatnonzero(content == 3)[[-1]]
    content[at] ^= 128
    content.flush()
    assert found(cache, 3) is None
    cache.write(3, block(3))
    assert found(cache, 3) == bytes(block(3))


def test_a_cache_of_another_size_is_refused(tmp_path: Path) -> None:
    BlockCache(tmp_path, SIZE)
    with pytest.raises(InputError, match=r"blocks: is a cache of .* GiB, not of data\.remote\.cache_size"):
        BlockCache(tmp_path, 2 * SIZE)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be opened: File exists; name another folder"):
        BlockCache(tmp_path / "file", SIZE)


def test_a_cache_is_no_file_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "cache/blocks").hardlink_to(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot be opened: has a second name"):
        BlockCache(tmp_path / "cache", SIZE)
    assert (tmp_path / "empty").stat().st_size == 0


@pytest.mark.timeout(120)
def test_processes_that_share_it_and_are_killed_leave_nothing_wrong(tmp_path: Path) -> None:
    processes = []
    try:
        for seed in range(3):
            command = [sys.executable, "-c", WRITER, str(tmp_path), str(seed)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        cache, hits = BlockCache(tmp_path, SIZE), 0
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            for key in range(1, 64):
                content = found(cache, key)
                hits += content is not None
                assert content in (None, bytes(block(key)))
        assert hits
        assert [process.poll() for process in processes] == [None] * 3  # none has read anything wrong
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for key in range(1, 64):
        assert found(cache, key) in (None, bytes(block(key)))
        cache.write(key, block(key))
        assert found(cache, key) == bytes(block(key))
