"""The folder of local checkpoints on a node: whose it is, what is deleted there, and who sends to whom."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.checkpoint.local.folder import IDENTITY, Life, LocalFolder
from megalite.checkpoint.local.nodes import Nodes

RUN = "0123456789abcdef" * 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_the_parts_of_every_rank_come_to_the_next_node_once(places: list[int]) -> None:
    nodes = Nodes([str(place) for place in places])
    sent: Counter[int] = Counter()
    for turn in nodes.rounds():
        assert len(set(turn.values())) == len(turn), "a rank receives from one at a time"
        for sender, target in turn.items():
            assert nodes.before(nodes.node_of[target]) == nodes.node_of[sender]
        sent.update(list(turn))
    assert sent == Counter(range(len(places)))


def test_lives_follow_each_other(tmp_path: Path) -> None:
    assert Life.of(tmp_path) is None
    first, second = Life.begin(tmp_path), Life.begin(tmp_path)
    assert (first.number, second.number, second.run) == (1, 2, first.run)
    assert Life.of(tmp_path) == second
    (tmp_path / IDENTITY).write_text('{"run": "..", "life": 3}')
    assert Life.of(tmp_path) is None
    assert Life.begin(tmp_path).run != first.run


def test_only_what_is_the_runs_own_is_deleted(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "data").mkdir(parents=True)
    old = LocalFolder(root, Life(RUN, 1))
    old.prepare("node-0")
    (old.folder / "step-00000001").mkdir()
    (old.run / "link").symlink_to(elsewhere)
    (root / "another run").mkdir()
    new = LocalFolder(root, Life(RUN, 2))
    new.prepare("node-0")
    assert os.listdir(new.run) == ["life-000002"]
    assert sorted(os.listdir(root)) == sorted(["another run", RUN])
    assert (elsewhere / "data").is_dir()
    assert new.marks() == ["node-0"]
    assert new.run.stat().st_mode & 0o777 == new.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("plant", ["link", "open", "file"])
def test_what_others_may_have_put_there_is_refused(plant: str, tmp_path: Path) -> None:
    place = LocalFolder(tmp_path, Life(RUN, 1))
    if plant == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.run.symlink_to(tmp_path / "theirs")
    elif plant == "open":
        place.run.mkdir()
        place.run.chmod(0o755)
    else:
        place.run.touch()
    with pytest.raises((InputError, FileExistsError)):
        place.prepare("node-0")
    assert list(place.held()) == []


def test_a_folder_in_which_anybody_may_rename_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match=r"anybody may rename what is in it; chmod o-w or \+t it"):
        LocalFolder(tmp_path, Life(RUN, 1)).prepare("node-0")
    tmp_path.chmod(0o1777)
    LocalFolder(tmp_path, Life(RUN, 1)).prepare("node-0")


def test_of_older_ones_the_newest_and_the_one_that_is_copied_stay(tmp_path: Path) -> None:
    place = LocalFolder(tmp_path, Life(RUN, 1))
    place.prepare("node-0")
    for name in ("step-00000001", "step-00000002", "step-00000003", "step-00000004.partial.7"):
        (place.folder / name).mkdir()
    place.make_way(place.partial_of(4, 8), pinned=1)
    names = {"node-0", "step-00000001", "step-00000003", "step-00000004.partial.8"}
    assert set(os.listdir(place.folder)) == names


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="Linux tells")
def test_memory_is_told_from_a_disk(tmp_path: Path) -> None:
    assert LocalFolder(Path("/dev/shm"), Life(RUN, 1)).in_memory
    assert not LocalFolder(Path("/proc"), Life(RUN, 1)).in_memory
