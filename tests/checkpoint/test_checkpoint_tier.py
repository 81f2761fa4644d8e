"""Local checkpoints: what is lost with which node, and that a run goes on from them as from any other."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from local_cases import (
    NODES,
    UNEVEN,
    failing_disk,
    lasting,
    one_folder,
    refuse_to_load,
    resume,
    resume_each,
    save_on_nodes,
    slow_copy,
    without_room,
)
from ranks import Ranks
from toy_jobs import assemble, config_of

from megalite.checkpoint.local.folder import IDENTITY
from megalite.checkpoint.store.disk import check_hashes
from megalite.checkpoint.store.manifest import MANIFEST, check_sizes, complete
from megalite.config.layout import Layout
from megalite.config.schema import Config

pytestmark = pytest.mark.timeout(300)
HYBRID = config_of(Layout(pp=2, dp_shard=2, tp=2))
FLAT = config_of(Layout(dp_shard=8))
SHARED, LAST, END = 1, 3, 5


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """A run that was killed after step 3, of which only step 1 is in the shared folder, and what its ranks had."""
    run = tmp_path_factory.mktemp("saved")
    return run, ranks.run(save_on_nodes, HYBRID, run, {SHARED}, LAST, NODES, END - LAST)


@pytest.fixture
def again(saved: tuple[Path, list], tmp_path: Path) -> Callable[..., Path]:
    """Copies of that run, without some nodes."""

    def make(name: str = "run", without: str = "") -> Path:
        run = tmp_path / name
        shutil.copytree(saved[0], run, symlinks=True)
        for node in without:
            shutil.rmtree(run / "nodes" / node)
        return run

    return make


def local(run: Path, node: str) -> dict[str, Path]:
    """The local checkpoints on a node, by name."""
    return {path.name: path for path in (run / "nodes" / node).glob("*/life-*/step-*")}


def test_every_node_has_its_own_files_and_those_of_the_node_before(saved: tuple[Path, list]) -> None:
    run, results = saved
    expected = [("SavedLocally", 1), ("Saved", 1), ("SavedLocally", 2), ("SavedLocally", 3)]
    assert [news for news, *_ in results] == [expected] * 8
    assert [path.name for path in complete(run / "checkpoints")] == ["step-00000001"]
    for node, ranks in {"a": (0, 1, 6, 7), "b": (0, 1, 2, 3), "c": (2, 3, 4, 5), "d": (4, 5, 6, 7)}.items():
        found = local(run, node)
        assert sorted(found) == ["step-00000002", "step-00000003"], "the older goes when the next begins"
        names = {path.name for path in found["step-00000003"].iterdir()}
        assert names == {"index.bin", ".metadata", MANIFEST, *(f"__{rank}_0.distcp" for rank in ranks)}
        for folder in (run / "nodes" / node).glob("*/**"):
            assert folder.is_file() or folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("config", [HYBRID, FLAT], ids=["same", "another"])
def test_a_run_goes_on_from_its_nodes(
    config: Config, saved: tuple[Path, list], again: Callable[..., Path], ranks: Ranks
) -> None:
    """To the bit, in any layout; and from then on the shared folder has it."""
    run = again()
    results = ranks.run(resume, config, run, NODES, END)
    final = run / "checkpoints/step-00000003"
    assert (results[0][0], results[0][1]) == (3, [f"step 3 was whole on the nodes alone; it is copied to {final}"])
    check_hashes(final, check_sizes(final).files)
    assert all(not local(run, node) for node in "abcd"), "the life before is over"
    for number, there in ((2, 1), (3, 2)):  # of what was loaded, and of the end
        found = assemble([result[number] for result in results])
        expected = assemble([result[there] for result in saved[1]])
        assert found.keys() == expected.keys()
        if number == 2 or config is HYBRID:
            assert all(found[name].equal(expected[name]) for name in expected)


def test_one_lost_node_costs_nothing_and_two_neighbours_little(again: Callable[..., Path], ranks: Ranks) -> None:
    """Two that are no neighbours cost nothing either: each one's parts are on the next."""
    lost = ["a", "b", "c", "d", "ac", "bd", "ab", "da", "abcd"]
    found = ranks.run(resume_each, HYBRID, [again(nodes, nodes) for nodes in lost])
    steps = {nodes: step for nodes, (step, _) in zip(lost, found[0], strict=True)}
    assert steps == {**dict.fromkeys(lost[:6], LAST), **dict.fromkeys(lost[6:], SHARED)}
    told = [said for _, said in found[0]]
    why = "is lost: of its 10 files, 2 are on none of these nodes: a, b, c and d"
    assert told[6] == [f"the local checkpoint of step {step} {why}" for step in (3, 2)]
    assert told[8] == []
    assert all([step for step, _ in each] == list(steps.values()) for each in found)


def test_damage_on_a_node_is_made_good_by_its_neighbour(again: Callable[..., Path], ranks: Ranks) -> None:
    """Damage on both costs a step; so does a manifest that is gone from every node."""
    once, twice, bare, short = (again(name) for name in ("once", "twice", "bare", "short"))
    for run, nodes in ((once, "b"), (twice, "bc")):
        for node in nodes:
            flip(local(run, node)["step-00000003"] / "__2_0.distcp")
    for node in "abcd":
        (local(bare, node)["step-00000003"] / MANIFEST).unlink()
    (local(short, "b")["step-00000003"] / "__2_0.distcp").write_bytes(b"")
    found = ranks.run(resume_each, HYBRID, [once, twice, bare, short])[0]
    assert [step for step, _ in found] == [3, 2, 2, 3]
    assert "the local checkpoint of step 3 is lost: node " in found[1][1][0]
    assert "__2_0.distcp does not have the hash it was written with" in found[1][1][0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_nothing_is_read_of_another_life_or_another_run(again: Callable[..., Path], ranks: Ranks) -> None:
    """Nodes that come back, in part with what a later start has not taken, and a run of the same name begun anew."""
    back, other, forged = again("back"), again("other"), again("forged")
    kept = again("kept", "cd") / "nodes"
    for node in "ab":
        shutil.rmtree(back / "nodes" / node)
    assert ranks.run(resume_each, HYBRID, [back])[0][0][0] == SHARED
    shutil.rmtree(back / "nodes")
    shutil.copytree(kept.parent.parent / "other" / "nodes", back / "nodes")  # all four, whole
    shutil.rmtree(other / "checkpoints")
    (forged / "checkpoints" / IDENTITY).write_text('{"run": "../../other", "life": 1}')
    found = ranks.run(resume_each, HYBRID, [back, other, forged])[0]
    assert [step for step, _ in found] == [SHARED, 0, SHARED]
    assert len(list((other / "nodes/a").iterdir())) == 2, "what may be another run's is left alone"
    assert all(not local(back, node) for node in "abcd")


def test_a_rollback_takes_none_of_what_came_later(again: Callable[..., Path], ranks: Ranks) -> None:
    first, second = again("first"), again("second")
    assert ranks.run(resume, HYBRID, first, NODES, 0, 3)[0][0] == 2
    assert ranks.run(resume, HYBRID, first)[0][0] == 2, "what came later is gone from the nodes"
    assert ranks.run(resume, HYBRID, second, NODES, 0, 2)[0][0] == 1


def test_a_full_shared_folder_does_not_lose_what_nodes_have(again: Callable[..., Path], ranks: Ranks) -> None:
    run = again()
    said = ranks.run(refuse_to_load, HYBRID, run)
    assert f"step 3 is whole on the nodes alone, and cannot be copied to {run}/checkpoints/step-00000003" in said[0]
    assert said == [said[0]] * 8
    assert ranks.run(resume, HYBRID, run)[0][0] == 3


@pytest.mark.parametrize("where", ["replica", "name"])
def test_a_full_disk_of_a_node_ends_nothing(where: str, tmp_path: Path, ranks: Ranks) -> None:
    found = ranks.run(failing_disk, HYBRID, tmp_path, 5 if where == "replica" else 4, where)
    expected = [("SavedLocally", 1), ("FailedLocally", 2), ("FailedLocally", 3), ("Saved", 3), ("SavedLocally", 4)]
    assert [news for news, _ in found] == [expected] * 8
    assert "No space left on device" in found[0][1]
    assert sorted(local(tmp_path, "c")) == ["step-00000001", "step-00000004"]
    assert ranks.run(resume, HYBRID, tmp_path)[0][0] == 4


def test_too_little_room_is_told_with_numbers(tmp_path: Path, ranks: Ranks) -> None:
    news, why = ranks.run(without_room, HYBRID, tmp_path)[0]
    assert news == [("LocalOff", 0), ("Saved", 2)] or news == [("Saved", 2), ("LocalOff", 0)]
    said = (
        r"node c: needs [\d.]+ [KM]iB, for 3 times [\d.]+ [KM]iB of its own ranks and [\d.]+ [KM]iB of the node before"
    )
    assert re.search(said + r" it, and has 1,000 B of room; until the next start, only shared checkpoints", why), why
    assert not any(local(tmp_path, node) for node in "abcd")


def test_one_folder_for_two_nodes_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    assert (
        "is the same folder on 4 nodes; name one that each node has for itself"
        in ranks.run(one_folder, HYBRID, tmp_path)[0]
    )


def test_saving_does_not_wait_for_copies(tmp_path: Path, ranks: Ranks) -> None:
    """Nor does a copy begin while one is under way: then a later checkpoint is copied."""
    for news, staged in ranks.run(slow_copy, HYBRID, tmp_path):
        assert staged == [1, 2, 3]
        copied = [step for kind, step in news if kind == "Saved"]
        assert copied[0] == 1
        assert copied[-1] == 5
        assert 2 not in copied
        assert [step for kind, step in news if kind == "SavedLocally"] == [1, 2, 3, 4, 5]
    assert list((tmp_path / "nodes/a").iterdir()) == [], "a run that has ended leaves nothing on nodes"


def test_a_checkpoint_that_is_kept_forever_is_copied_itself(tmp_path: Path, ranks: Ranks) -> None:
    for news in ranks.run(lasting, HYBRID, tmp_path):
        assert {2, 4} <= {step for kind, step in news if kind == "Saved"}
    assert {"step-00000002", "step-00000004"} <= {path.name for path in complete(tmp_path / "checkpoints")}


def test_nodes_may_have_different_numbers_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    for lost in ("a", "c"):
        run = tmp_path / lost
        expected = assemble([there for _, there, _ in ranks.run(save_on_nodes, HYBRID, run, (), 1, UNEVEN)])
        shutil.rmtree(run / "nodes" / lost)
        results = ranks.run(resume, FLAT, run, UNEVEN)
        found = assemble([there for _, _, there, _ in results])
        assert results[0][0] == 1
        assert all(found[name].equal(expected[name]) for name in expected)


def test_a_single_node_has_no_neighbour(tmp_path: Path, ranks: Ranks) -> None:
    news, *_ = ranks.run(save_on_nodes, HYBRID, tmp_path, {1}, 2, ("a",) * 8)[0]
    assert news == [("SavedLocally", 1), ("Saved", 1), ("SavedLocally", 2)]
    assert ranks.run(resume, HYBRID, tmp_path, ("a",) * 8)[0][0] == 2
