"""The manifest: every field has its type and range, and files are plain files of their folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tampering import DATA, MANIFESTS, tamper

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError, File, check_hashes, measure, opened, read_whole
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, MAX_MANIFEST_BYTES, Manifest, check_sizes, complete
from megalite.config.convert import to_plain
from megalite.config.schema import Config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of three bytes."""
    return made_in(tmp_path)


def made_in(folder: Path) -> Path:
    path = folder / "step-00000010"
    path.mkdir()
    for name in (INDEX, DATA):
        (path / name).write_bytes(b"abc")
    files = {name: measure(path, name) for name in (INDEX, DATA)}
    layout = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    config, saved = to_plain(Config()), "2026-01-02T03:04:05+00:00"
    (path / MANIFEST).write_text(Manifest(10, 1280, saved, 2, layout, {"megalite": "0.1"}, config, (), files).render())
    return path


@pytest.mark.parametrize("how", MANIFESTS)
def test_what_makes_no_sense_is_damage_whatever_the_digest(how: str, path: Path) -> None:
    change, told = MANIFESTS[how]
    check_sizes(path)
    tamper(path, change)
    with pytest.raises(DamagedError) as caught:
        check_sizes(path)
    assert told in str(caught.value)


def test_fields_of_a_later_version_are_named(path: Path) -> None:
    tamper(path, lambda fields: fields.update(weather="fine", moon="full"))
    with pytest.raises(InputError, match="reads format 2 and does not know 'weather' and 'moon'") as caught:
        check_sizes(path)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" + "[]," * (4 << 20),
        '{"a":' * 50_000,
        '{"step": ' + "9" * 5000 + "}",
        "NaN",
        '{"digest": [[[]]]}',
        "\0",
    ],
    ids=range(7),
)
def test_what_is_no_manifest_at_all_is_damage(text: str, path: Path) -> None:
    (path / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match="is damaged"):
        Manifest.read(path)


def test_a_manifest_is_not_read_beyond_its_limit(path: Path) -> None:
    os.truncate(path / MANIFEST, MAX_MANIFEST_BYTES + 1)
    with pytest.raises(
        DamagedError, match=f"has {MAX_MANIFEST_BYTES + 1} bytes; at most {MAX_MANIFEST_BYTES} are read"
    ):
        Manifest.read(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


def paths(fields: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in it."""
    items = fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    return [found for key, value in items for found in [(*here, key), *paths(value, (*here, key))]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_changes_are_bad_input_or_change_nothing(data: st.DataObject, path: Path) -> None:
    original = (path / MANIFEST).read_text()
    fields = json.loads(original)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(paths(fields)))
        inner = fields
        for key in way:
            inner = inner[key]
        what = data.draw(st.sampled_from(["set", "drop", "add"]))
        if what == "set" or not isinstance(inner, dict):
            inner[last] = data.draw(values)
        elif what == "drop":
            del inner[last]
        else:
            inner[data.draw(st.text(max_size=9))] = data.draw(values)
    tamper(path, lambda before: (before.clear(), before.update(fields)))
    try:
        manifest = check_sizes(path)
        assert manifest.step == 10
        assert isinstance(manifest.configuration, Config)
    except InputError as refusal:
        assert str(refusal).startswith(str(path))  # noqa: PT017, as nothing need be refused
    finally:
        (path / MANIFEST).write_text(original)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to a file of the folder": (lambda file: file.symlink_to(INDEX), "is a link"),
    "a link to a file elsewhere": (lambda file: file.symlink_to("/etc/hostname"), "is a link"),
    "a link to itself": (lambda file: file.symlink_to(file.name), "is a link"),
    "an endless device": (lambda file: file.symlink_to("/dev/zero"), "is a link"),
    "a pipe": (os.mkfifo, "is no regular file"),
    "a folder": (Path.mkdir, "is no regular file"),
    "nothing": (lambda file: None, "is missing"),
}


@pytest.mark.parametrize("how", PLANTED)
@pytest.mark.parametrize("name", [DATA, INDEX, MANIFEST])
@pytest.mark.timeout(20)
def test_only_regular_files_of_the_folder_are_opened(name: str, how: str, path: Path) -> None:
    plant, told = PLANTED[how]
    file = {name: File(3, "0" * 32)}
    (path / name).unlink()
    plant(path / name)
    for read in (
        lambda: check_sizes(path),
        lambda: check_hashes(path, file),
        lambda: read_whole(path, name, 100),
        lambda: opened(path, name).__enter__(),
    ):
        with pytest.raises(DamagedError, match=f"{name} {told}"):
            read()


def test_what_the_system_refuses_is_damage(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file in place of a folder")
    with pytest.raises(DamagedError, match="cannot be read: Not a directory"):
        check_sizes(path)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(DamagedError, match="is a link"):
        check_sizes(path)
    with pytest.raises(DamagedError, match="embedded null byte"):
        check_sizes(Path("x\0y"))
    with pytest.raises(DamagedError, match="cannot be read: File name too long"):
        check_sizes(path.parent / f"step-{'9' * 5000}")


def test_names_of_checkpoints(tmp_path: Path) -> None:
    good = ["step-00000001", "step-123456789", "step-999999999999999999"]
    bad = ["step-1", "step-000000010", "step-" + "9" * 200, "step-٠٠٠٠٠٠٠١", "step-00000001.damaged", "step-0000000a"]
    for name in good + bad:
        (tmp_path / name).mkdir()
    assert [path.name for path in complete(tmp_path)] == good


def test_a_folder_of_checkpoints_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(InputError, match="checkpoints: cannot be read: Not a directory"):
        complete(tmp_path / "checkpoints")
