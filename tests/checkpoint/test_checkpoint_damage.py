"""Whatever happens to the files of a checkpoint is noticed, and the one before it is used."""

import errno
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ranks
from tampering import tamper
from toy_jobs import config_of, load_newest, make, one_rank, restorer, save, train_and_save

from megalite.base.errors import InputError
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.store.disk import share_of
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, check_sizes, complete
from megalite.config.layout import Layout

OLDER, NEWER = "step-00000001", "step-00000002"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with one_rank():
        job = make(config_of(Layout()))
        save(job, folder, 1)
        save(job, folder, 2)
    return folder


@pytest.fixture(scope="module")
def reader(original: Path) -> Iterator[Restorer]:
    """A job of one rank that stays up; `original` has had its own."""
    with one_rank():
        yield restorer(make(config_of(Layout())))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def newest(reader: Restorer, folder: Path) -> tuple[int, list[str]]:
    """The step that a run would continue from, and the warnings on the way."""
    said: list[str] = []
    progress = reader.newest(folder, said.append)
    assert progress is not None
    return progress.step, said


def noticed(reader: Restorer, folder: Path) -> str:
    """What is said of the newer checkpoint, which is damaged; the older one is used."""
    step, said = newest(reader, folder)
    assert step == 1
    assert len(said) == 1
    assert NEWER in said[0]
    assert {path.name for path in folder.iterdir()} == {OLDER, f"{NEWER}.damaged"}
    return said[0]


def damage_with(change: Callable[[bytes], bytes], path: Path) -> None:
    before = path.read_bytes()
    after = change(before)
    assert after != before
    path.write_bytes(after)


def flip(position: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def test_an_intact_checkpoint_is_taken_without_a_word(reader: Restorer, folder: Path) -> None:
    assert newest(reader, folder) == (2, [])


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, INDEX, MANIFEST])
def test_every_flipped_bit_is_noticed(name: str, reader: Restorer, original: Path, tmp_path: Path) -> None:
    """40 positions of each file: the first and last bytes, and others drawn by chance."""
    size = (original / NEWER / name).stat().st_size
    chance = random.Random(name)
    positions = [*range(8), *range(size - 8, size), *(chance.randrange(size) for _ in range(24))]
    for number, position in enumerate(positions):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        damage_with(flip(position, chance.randrange(8)), folder / NEWER / name)
        assert name in noticed(reader, folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, INDEX, MANIFEST])
def test_every_truncation_is_noticed(name: str, reader: Restorer, original: Path, tmp_path: Path) -> None:
    size = (original / NEWER / name).stat().st_size
    chance = random.Random(name)
    for number, left in enumerate([0, 1, size - 1, *(chance.randrange(size) for _ in range(12))]):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        damage_with(lambda data, left=left: data[:left], folder / NEWER / name)
        assert name in noticed(reader, folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, INDEX, MANIFEST])
def test_missing_and_longer_files_are_noticed(name: str, reader: Restorer, folder: Path, original: Path) -> None:
    (folder / NEWER / name).unlink()
    assert name in noticed(reader, folder)
    shutil.rmtree(folder)
    shutil.copytree(original, folder)
    damage_with(lambda data: data + b"\n", folder / NEWER / name)
    assert name in noticed(reader, folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA])
def test_files_of_another_checkpoint_are_noticed(name: str, reader: Restorer, folder: Path) -> None:
    damage_with(lambda _: b"\0" * (folder / NEWER / name).stat().st_size, folder / NEWER / name)
    assert name in noticed(reader, folder)


def test_what_was_never_finished_is_not_chosen(reader: Restorer, folder: Path) -> None:
    """Not even if it is whole: it was not yet known to be durable."""
    shutil.copytree(folder / NEWER, folder / "step-00000003.partial")
    shutil.copytree(folder / NEWER, folder / "step-00000004.deleted")
    (folder / "step-00000005.partial").mkdir()
    (folder / "step-x").mkdir()
    assert newest(reader, folder) == (2, [])


def test_an_empty_folder_of_that_name_is_not_chosen(reader: Restorer, folder: Path) -> None:
    (folder / "step-00000003").mkdir()
    step, said = newest(reader, folder)
    assert step == 2
    assert said == [
        f"{folder / 'step-00000003'}: {MANIFEST} is missing; it is set aside as step-00000003.damaged, and the one "
        "before is used"
    ]


ODD: dict[str, Callable[[Path], object]] = {
    "a link to an intact checkpoint": lambda path: path.symlink_to(path.with_name(OLDER), target_is_directory=True),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a file": Path.touch,
    "a pipe": os.mkfifo,
    "a manifest that is a folder": lambda path: (path / MANIFEST).mkdir(parents=True),
    "a manifest without end": lambda path: (path.mkdir(), (path / MANIFEST).symlink_to("/dev/zero")),
    "a manifest that is a pipe": lambda path: (path.mkdir(), os.mkfifo(path / MANIFEST)),
    "another step": lambda path: shutil.copytree(path.with_name(NEWER), path),
    "a manifest of nonsense": lambda path: tamper(
        shutil.copytree(path.with_name(NEWER), path), lambda fields: fields.update(step=3, files=[])
    ),
    "an index of nonsense": lambda path: (
        shutil.copytree(path.with_name(NEWER), path),
        (path / INDEX).write_bytes(b"nonsense"),
        tamper(path, lambda fields: fields.update(step=3)),
    ),
    "progress of another step": lambda path: (
        shutil.copytree(path.with_name(NEWER), path),
        tamper(path, lambda fields: fields.update(step=3)),
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ODD)
def test_whatever_has_the_name_of_a_checkpoint_the_one_before_is_found(
    how: str, reader: Restorer, folder: Path
) -> None:
    odd = folder / "step-00000003"
    ODD[how](odd)
    step, said = newest(reader, folder)
    assert (step, len(said)) == (2, 1)
    assert "it is set aside as step-00000003.damaged, and the one before is used" in said[0]
    assert not os.path.lexists(odd)
    assert {OLDER, NEWER} <= {path.name for path in folder.iterdir()}, "what a link names stays"
    assert newest(reader, folder) == (2, [])


@pytest.mark.parametrize("name", [MANIFEST, "__0_0.distcp"])
def test_where_nothing_can_be_renamed_the_one_before_is_used_all_the_same(
    name: str, reader: Restorer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    damage_with(flip(3000 if name != MANIFEST else 300, 1), folder / NEWER / name)
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "rename", refused)
        step, said = newest(reader, folder)
        assert (step, len(said)) == (1, 1)
        assert "it cannot be set aside (Read-only file system), and the one before is used" in said[0]
        (folder / OLDER / MANIFEST).unlink()
        with pytest.raises(InputError, match="holds no intact checkpoint, but step-00000002, which is damaged"):
            reader.newest(folder, lambda _: None)


def test_tensors_of_another_dtype_are_damage(reader: Restorer, folder: Path) -> None:
    """Half of the bytes would be read as all."""
    index = Index.decode((folder / NEWER / INDEX).read_bytes())
    name = "optimizer.exp_avg.embed.weight"
    changed = {**index.tensors, name: replace(index.tensors[name], dtype="float16")}
    (folder / NEWER / INDEX).write_bytes(Index(index.files, changed).encode())
    tamper(folder / NEWER)
    step, said = newest(reader, folder)
    assert step == 1
    assert f"{name} float16 [32, 16] instead of float64 [32, 16]" in said[0]


def test_a_second_of_the_same_name_is_set_aside_too(reader: Restorer, folder: Path) -> None:
    shutil.copytree(folder / NEWER, folder / f"{NEWER}.damaged")
    (folder / NEWER / MANIFEST).unlink()
    assert newest(reader, folder)[0] == 1
    assert (folder / f"{NEWER}.damaged.2").is_dir()


def test_where_all_are_damaged_training_does_not_begin_anew(reader: Restorer, folder: Path) -> None:
    for path in complete(folder):
        damage_with(flip(1000, 1), path / "__0_0.distcp")
    for _ in range(2):  # nor at the second try
        with pytest.raises(InputError, match=r"holds no intact checkpoint, but step-00000002\.damaged"):
            reader.newest(folder, lambda _: None)


def test_no_checkpoint_at_all_is_a_beginning(reader: Restorer, tmp_path: Path) -> None:
    assert reader.newest(tmp_path / "checkpoints", pytest.fail) is None


def test_without_verification_sizes_still_count(
    reader: Restorer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.config.checkpoint, "verify", False)
    damage_with(flip(5000, 0), folder / NEWER / "__0_0.distcp")
    assert newest(reader, folder) == (2, [])
    damage_with(lambda data: data[:-1], folder / NEWER / "__0_0.distcp")
    assert newest(reader, folder)[0] == 1


class Evil:
    """Its pickle runs code when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self.trace)!r}, 'w')",)


def test_no_pickle_is_read(reader: Restorer, folder: Path) -> None:
    """Neither DCP's index nor what torch writes around the elements of a tensor."""
    path, trace = folder / NEWER, folder / "ran"
    (path / METADATA).write_bytes(pickle.dumps(Evil(trace)))
    data = bytearray((path / "__0_0.distcp").read_bytes())
    evil, at = pickle.dumps(Evil(trace), 2), data.index(b"\x80\x02ctorch._utils")
    data[at : at + len(evil)] = evil
    (path / "__0_0.distcp").write_bytes(data)
    tamper(path)
    assert newest(reader, folder) == (2, [])
    assert not trace.exists()


def test_another_format_is_refused_by_number(reader: Restorer, folder: Path) -> None:
    tamper(folder / NEWER, lambda fields: fields.update(format=3, weather="fine"))
    with pytest.raises(InputError, match="has format 3; this megalite reads format 2 and does not know 'weather'"):
        newest(reader, folder)
    assert (folder / NEWER).is_dir(), "it is not damaged"


def test_damage_that_one_rank_sees_is_damage_for_all(ranks: Ranks, tmp_path: Path) -> None:
    """Every file is hashed by one rank, and read by others."""
    config = config_of(Layout(pp=2, dp_shard=2, tp=2))
    ranks.run(train_and_save, config, tmp_path, 1)
    ranks.run(train_and_save, config, tmp_path, 2)
    path = tmp_path / NEWER
    files = check_sizes(path).files
    assert len({rank for rank in range(8) if share_of(files, rank, 8)}) == 8
    damage_with(flip(3000, 3), path / "__5_0.distcp")
    results = ranks.run(load_newest, config, tmp_path)
    assert {step for step, _ in results} == {1}
    assert [len(said) for _, said in results] == [1] + [0] * 7, "one rank speaks"
    assert "__5_0.distcp" in results[0][1][0]
