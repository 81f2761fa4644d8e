"""Stores on a server that speaks S3: they are read as those on a disk, whatever fails on the way."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from object_server import BUCKET, ObjectServer

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.schema import Data, Remote, Source
from megalite.data.block_cache import BLOCK_BYTES, open_cache
from megalite.data.check import Scans, check_data
from megalite.data.description import Description
from megalite.data.hashes import write_hashes
from megalite.data.joined_store import open_store
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.data.shards import Shard, write_shards
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite.plan.batches import GlobalBatch
from megalite_tools.data.merge_data import main as merge

DOCUMENTS, LENGTH, VOCABULARY = 90, 2048, 60_000
ALL = (".bin", ".idx", ".mask", ".json", ".hashes")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer().running() as running:
        yield running


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A masked store of 0.9 MB, 54 blocks, with hashes."""
    random = np.random.default_rng(0)
    prefix = tmp_path_factory.mktemp("local") / "store"
    with StoreWriter(prefix, "uint16", masked=True) as writer:
        for _ in range(DOCUMENTS):
            tokens = random.integers(VOCABULARY, size=random.integers(1, 10_000))
            writer.add(tokens, tokens % 3 > 0)
    store = TokenStore(prefix)
    write_hashes(store.prefix, store.files)
    return store.prefix


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr("megalite.data.remote.FIRST_PAUSE", 0.05)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # so that megalite's own tries are what is tested
    return Remote(str(tmp_path / "cache"), 0.01, 20)


@pytest.fixture
def upload(server: ObjectServer, local: str, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Uploads the store's files with some suffixes and returns the prefix of their URLs."""

    def put(suffixes: tuple[str, ...] = ALL) -> str:
        for suffix in suffixes:
            server.put(f"{tmp_path.name}/store{suffix}", Path(local + suffix).read_bytes())
        return f"s3://{BUCKET}/{tmp_path.name}/store"

    yield put
    server.faults.clear()


def samples_of(prefix: str, remote: Remote | None = None) -> Samples:
    return Samples([Source(prefix)], 5, LENGTH, VOCABULARY, remote=remote)


def assert_same(found: Samples, expected: Samples, count: int = 64) -> None:
    for ours, theirs in zip(found.read(range(count)), expected.read(range(count)), strict=True):
        for field in dataclasses.fields(theirs):
            assert np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
    assert found.trained_targets(range(count)) == expected.trained_targets(range(count))


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_remote_store_is_as_one_on_a_disk(
    server: ObjectServer, local: str, remote: Remote, upload: Callable[..., str], scheme: str, tmp_path: Path
) -> None:
    prefix = upload()
    if scheme == "http":
        prefix = prefix.replace("s3:/", server.url)
    here, there = TokenStore(local), TokenStore(prefix, remote)
    assert there.verify() == here.verify()
    assert there.fingerprint() == here.fingerprint()
    assert Description.read(there.description_prefix) == Description.read(local)
    assert np.array_equal(there.document(7), here.document(7))
    assert_same(samples_of(prefix, remote), samples_of(local))
    checked = [
        check_data(Data(train=[Source(each)], remote=remote), Model(vocab_size=VOCABULARY), Scans(tmp_path / "scans"))
        for each in (prefix, local)
    ]
    assert checked[0] == checked[1]
    before = server.reads.copy()
    assert_same(samples_of(prefix, remote), samples_of(local))
    assert server.reads == before  # all of it was in the cache
    batch = GlobalBatch(3, 8)
    read, expected = (Loader(each, 2, 2, 1).read(batch) for each in (samples_of(prefix, remote), samples_of(local)))
    assert bool((read.tokens == expected.tokens).all())
    assert read.documents == expected.documents


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_list_of_remote_shards_is_as_the_merged_store_on_a_disk(
    server: ObjectServer, local: str, remote: Remote, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, shards = TokenStore(local), []
    for number, (first, last) in enumerate(((0, 20), (20, 21), (21, DOCUMENTS))):
        with StoreWriter(tmp_path / f"part{number}", "uint16", masked=True) as writer:
            for at in range(first, last):
                start, end = store.bounds(at)
                writer.add(store.read(start, end - start), store.trained(start, end - start))
        part = TokenStore(tmp_path / f"part{number}")
        write_hashes(part.prefix, part.files)
        shards.append(Shard(f"parts/{number}", part.documents, part.tokens))
        for suffix in ALL:
            server.put(f"{tmp_path.name}/parts/{number}{suffix}", Path(part.prefix + suffix).read_bytes())
    write_shards(tmp_path / "list", shards)
    server.put(f"{tmp_path.name}/list.shards", (tmp_path / "list.shards").read_bytes())
    prefix = f"s3://{BUCKET}/{tmp_path.name}/list"
    if scheme == "http":
        prefix = prefix.replace("s3:/", server.url)
    server.faults = {"bin": ["503", "wrong"]}
    assert open_store(prefix, remote).fingerprint() == store.fingerprint()
    assert_same(samples_of(prefix, remote), samples_of(local))
    assert not server.faults["bin"]
    checked = [
        check_data(Data(train=[Source(each)], remote=remote), Model(vocab_size=VOCABULARY), Scans(tmp_path / "scans"))
        for each in (prefix, local)
    ]
    assert checked[0] == checked[1]
    monkeypatch.setattr("megalite.data.joined_store.Remote", lambda: remote)
    assert merge([str(tmp_path / "merged"), prefix]) == 0
    for suffix in (".bin", ".idx", ".mask", ".json"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(local + suffix).read_bytes()
    with pytest.raises(InputError, match=r"lost\.idx: no such object; a token store is .* list"):
        open_store(prefix.replace("list", "lost"), remote)


@pytest.mark.parametrize("hashed", [True, False])
def test_a_store_without_mask_or_description(
    local: str, remote: Remote, upload: Callable[..., str], hashed: bool, tmp_path: Path
) -> None:
    plain = str(tmp_path / "plain")
    for suffix in (".bin", ".idx"):
        os.link(local + suffix, plain + suffix)
    prefix = upload((".bin", ".idx"))
    there = TokenStore(prefix, remote)
    assert (there.mask, Description.read(there.description_prefix)) == (None, None)
    assert there.verify() == TokenStore(plain).verify()
    assert_same(samples_of(prefix, remote), samples_of(plain))


@pytest.mark.parametrize("fault", ["503", "stalled", "short", "cut off", "wrong"])
def test_what_fails_is_asked_for_again(
    server: ObjectServer,
    local: str,
    remote: Remote,
    upload: Callable[..., str],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megalite.data.remote.REQUEST_SECONDS", 0.5)
    server.faults = {suffix[1:]: [fault] * 2 for suffix in (".bin", ".idx", ".mask")}
    samples = samples_of(upload(), remote)
    assert_same(samples, samples_of(local))
    assert not any(server.faults.values())
    told = capsys.readouterr().err
    assert f"{samples.parts[0].path}.bin: " in told
    assert "next try in 0.05 s" in told


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_mask_of_which_the_server_tells_nothing_for_now_is_waited_for(
    server: ObjectServer, remote: Remote, upload: Callable[..., str], scheme: str
) -> None:
    """Without its mask, a store would be read as one in which all tokens are trained."""
    prefix = upload() if scheme == "s3" else upload().replace("s3:/", server.url)
    server.faults = {"facts of mask": ["503"] * 3}
    assert TokenStore(prefix, remote).mask is not None
    assert server.faults == {"facts of mask": []}


def test_a_server_that_stays_silent_ends_the_read_after_the_timeout(
    server: ObjectServer, remote: Remote, upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.data.remote.REQUEST_SECONDS", 0.2)
    samples = samples_of(upload(), dataclasses.replace(remote, timeout=0.7))
    server.faults = {"bin": ["stalled"] * 100}
    with pytest.raises(
        InputError, match=r"store\.bin: could not be read for \d s: no answer for 0.2 s.*remote.timeout"
    ):
        samples.read(range(4))


@pytest.mark.parametrize("suffixes", [ALL, (".bin", ".idx", ".mask", ".json")])
def test_an_object_that_changes_is_refused(
    server: ObjectServer,
    local: str,
    remote: Remote,
    upload: Callable[..., str],
    suffixes: tuple[str, ...],
    tmp_path: Path,
) -> None:
    samples = samples_of(upload(suffixes), remote)
    other = np.fromfile(local + ".bin", "<u2")[::-1]
    server.put(f"{tmp_path.name}/store.bin", other.tobytes())
    with pytest.raises(InputError, match=r"store\.bin: has changed or gone since it was opened"):
        samples.read(range(64))


def test_an_object_that_does_not_fit_its_hashes_is_refused(
    server: ObjectServer, local: str, remote: Remote, upload: Callable[..., str], tmp_path: Path
) -> None:
    prefix = upload()
    content = bytearray(Path(local + ".bin").read_bytes())
    content[5 * BLOCK_BYTES + 7] ^= 1
    server.put(f"{tmp_path.name}/store.bin", content)
    with pytest.raises(InputError, match=r"store\.bin: block 5 of 16,384 bytes is not as its hash in \.hashes says"):
        TokenStore(prefix, remote).verify()
    server.put(f"{tmp_path.name}/store.hashes", bytes(48))
    with pytest.raises(InputError, match=r"store\.hashes: are not the hashes of this store: 48 bytes, expected"):
        TokenStore(prefix, remote)


@pytest.mark.parametrize(("scheme", "status"), [("s3", 403), ("s3", 404), ("http", 403)])
def test_an_answer_that_will_stay_the_same_ends_the_read_at_once(
    server: ObjectServer, remote: Remote, upload: Callable[..., str], scheme: str, status: int
) -> None:
    prefix = upload() if scheme == "s3" else upload().replace("s3:/", server.url)
    samples = samples_of(prefix, remote)
    server.faults = {"bin": [str(status)]}
    with pytest.raises(InputError, match=r"store\.bin: cannot be read: .*do this machine's credentials"):
        samples.read([0])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_an_object_that_is_not_there_is_named(remote: Remote, upload: Callable[..., str], suffix: str) -> None:
    prefix = upload(tuple(each for each in ALL if each != suffix))
    with pytest.raises(InputError, match=f"{prefix}{suffix}: no such object"):
        TokenStore(prefix, remote)


def test_a_copy_is_not_written_through_a_link(remote: Remote, upload: Callable[..., str], tmp_path: Path) -> None:
    prefix, victim = upload(), tmp_path / "victim"
    victim.write_text("precious")
    TokenStore(prefix, remote)
    copy = next((tmp_path / "cache/copies").rglob("*.idx"))
    copy.unlink()
    copy.with_name(f".{copy.name}.{os.getpid()}").symlink_to(victim)  # a name that could be foreseen
    TokenStore(prefix, remote)
    assert (copy.is_file(), victim.read_text()) == (True, "precious")


def test_a_full_disk_costs_the_cache_alone(
    local: str,
    remote: Remote,
    upload: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = samples_of(upload(), remote)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megalite.data.block_cache.os.pwrite", full)
    assert_same(samples, samples_of(local))
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_cache_smaller_than_the_store_is_as_good(local: str, remote: Remote, upload: Callable[..., str]) -> None:
    small = dataclasses.replace(remote, cache_size=8.1 * BLOCK_BYTES / 2**30)
    prefix = upload()
    for _ in range(2):
        assert_same(samples_of(prefix, small), samples_of(local))
    cache = open_cache(Path(small.cache), int(small.cache_size * 2**30))
    assert cache.path.stat().st_size <= small.cache_size * 2**30
