"""Checkpoints: any layout loads any other's, element by element, and training goes on as if never stopped."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ranks import SIZE, Ranks
from toy_jobs import (
    MODEL,
    advance,
    assemble,
    config_of,
    empty_parts,
    load_and_train,
    load_weights,
    make,
    one_rank,
    parts,
    save,
    train_and_save,
)

from megalite.checkpoint import store
from megalite.config.errors import InputError
from megalite.config.layout import Layout
from megalite.config.schema import RopeScaling

PIPELINE = Layout(pp=2, dp_shard=2, tp=2)
FLAT = Layout(dp_shard=4, tp=2)
HYBRID = Layout(dp_replicate=2, dp_shard=2, tp=2)
DEEP = Layout(pp=4, dp_shard=2)
WIDE = Layout(dp_shard=SIZE)
TIED = replace(MODEL, tie_embeddings=True)
NARROW = replace(MODEL, qk_norm=True)  # norms as wide as a head: 4 elements for 8 ranks


@pytest.mark.parametrize(
    ("saved", "loaded", "model"),
    [
        (PIPELINE, FLAT, MODEL),
        (FLAT, DEEP, MODEL),
        (HYBRID, PIPELINE, MODEL),
        (DEEP, HYBRID, MODEL),
        (DEEP, PIPELINE, TIED),
        (FLAT, DEEP, TIED),
        (WIDE, HYBRID, NARROW),
        (PIPELINE, WIDE, NARROW),
    ],
    ids=["pipeline to flat", "flat to deep", "from HSDP", "to HSDP", "tied", "to tied", "from empty", "to empty"],
)
def test_any_layout_loads_any_other(saved: Layout, loaded: Layout, model: object, ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks.run(train_and_save, config_of(saved, model), tmp_path, 2)
    path = store.complete(tmp_path)[-1]
    read = ranks.run(load_and_train, config_of(loaded, model), path, 2)
    assert read[0][0] == store.Progress(2, 16, asdict(model))
    expected, found = assemble([there for _, there in wrote]), assemble([there for _, there, _, _ in read])
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    assert all(tensor.any() for tensor in expected.values()), "a tensor of zeros would compare equal to nothing loaded"


@pytest.mark.parametrize(("saved", "loaded"), [("zbv", "1f1b"), ("interleaved_1f1b", "zbv"), ("1f1b", "dualpipev")])
def test_virtual_stages_exchange_checkpoints(saved: str, loaded: str, ranks: Ranks, tmp_path: Path) -> None:
    """In a V both copies of a tied embedding are on one rank."""
    wrote = ranks.run(train_and_save, config_of(PIPELINE, TIED, saved), tmp_path, 2)
    read = ranks.run(load_and_train, config_of(PIPELINE, TIED, loaded), tmp_path / "step-00000002", 3)
    expected, found = assemble([there for _, there in wrote]), assemble([there for _, there, _, _ in read])
    assert all(expected[name].equal(found[name]) for name in expected)
    assert all(tensor.any() for tensor in expected.values())
    assert assemble([there for _, _, _, there in read]).keys() == expected.keys(), "and the copies agree after a step"


@pytest.mark.parametrize("model", [NARROW, TIED], ids=["narrow norms", "tied"])
def test_one_rank_and_eight_exchange_checkpoints(model: object, ranks: Ranks, tmp_path: Path) -> None:
    alone = config_of(Layout(), model)
    with one_rank():
        _, expected = train_and_save(alone, tmp_path / "one", 2)
    read = ranks.run(load_and_train, config_of(PIPELINE, model), tmp_path / "one/step-00000002", 2)
    found = assemble([there for _, there, _, _ in read])
    assert all(expected[name].values.equal(found[name]) for name in expected)

    wrote = ranks.run(train_and_save, config_of(WIDE, model), tmp_path / "eight", 2)
    assert (empty_parts([there for _, there in wrote]) > 0) == (model is NARROW)
    with one_rank():
        _, back, _, _ = load_and_train(alone, tmp_path / "eight/step-00000002", 2)
    eight = assemble([there for _, there in wrote])
    assert all(back[name].values.equal(eight[name]) for name in eight)


@pytest.mark.parametrize("layout", [PIPELINE, HYBRID], ids=str)
def test_resuming_in_the_same_layout_changes_no_bit(layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(layout, TIED)
    whole = ranks.run(train_and_save, config, tmp_path, 3, 6)
    second = ranks.run(load_and_train, config, tmp_path / "step-00000003", 6)
    assert whole[0][0][3:] == second[0][2]
    expected, found = assemble([there for _, there in whole]), assemble([there for _, _, _, there in second])
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize(("before", "after"), [(PIPELINE, FLAT), (WIDE, DEEP)], ids=["3D to flat", "flat to pipeline"])
def test_resuming_in_another_layout_changes_only_rounding(
    before: Layout, after: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks.run(train_and_save, config_of(before, NARROW), tmp_path, 3, 6)
    second = ranks.run(load_and_train, config_of(after, NARROW), tmp_path / "step-00000003", 6)
    assert whole[0][0][3:] == pytest.approx(second[0][2], rel=1e-10)
    expected, found = assemble([there for _, there in whole]), assemble([there for _, _, _, there in second])
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() <= 1e-10 * tensor.abs().max(), name


def test_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks.run(train_and_save, config_of(HYBRID, NARROW), tmp_path, 2)
    read = ranks.run(load_weights, config_of(PIPELINE, NARROW), tmp_path / "step-00000002")
    assert all(untouched for _, untouched in read)
    expected, found = assemble([there for _, there in wrote]), assemble([there for there, _ in read])
    assert all(expected[name].equal(tensor) for name, tensor in found.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with one_rank():
        train_and_save(config_of(Layout()), folder, 1)
    return folder / "step-00000001"


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (replace(MODEL, vocab_size=64), ["vocab_size"]),
        (replace(MODEL, layers=3, ffn=48, qkv_bias=False), ["layers", "ffn", "qkv_bias"]),
        (replace(MODEL, rope_theta=5e5, norm_eps=1e-6), ["rope_theta", "norm_eps"]),  # the same shapes
        (replace(MODEL, rope_scaling=RopeScaling()), ["rope_scaling"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_model_is_refused_with_every_difference(saved: Path, model: object, keys: list[str]) -> None:
    with one_rank(), pytest.raises(InputError) as caught:
        load_and_train(config_of(Layout(), model), saved, 1)
    assert [problem.key for problem in caught.value.problems] == [f"model.{key}" for key in keys]
    assert str(saved) in str(caught.value)


def test_sequence_length_and_initialization_may_change(saved: Path) -> None:
    with one_rank():
        progress, _, _, _ = load_and_train(
            config_of(Layout(), replace(MODEL, sequence_length=16, init_std=1.0)), saved, 1
        )
    assert progress.step == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "progress.json").unlink(), "is not a complete checkpoint"),
        (lambda path: (path / "progress.json").write_text('{"step": 1, "samp'), "is not a complete checkpoint"),
        (lambda path: (path / "progress.json").write_text('{"step": 1}'), "is not a complete checkpoint"),
        (lambda path: (path / ".metadata").unlink(), r"it has no \.metadata"),
        (lambda path: next(path.glob("*.distcp")).unlink(), r"cannot be read: rank 0: .*No such file"),
        (lambda path: next(path.glob("*.distcp")).write_bytes(b""), "cannot be read: rank 0"),
        (shutil.rmtree, "is not a complete checkpoint"),
    ],
    ids=["no progress", "half a progress", "part of a progress", "no index", "no tensors", "empty tensors", "nothing"],
)
@pytest.mark.parametrize("load", [load_and_train, load_weights], ids=["all", "weights"])
def test_an_incomplete_checkpoint_is_bad_input(
    saved: Path, tmp_path: Path, load: object, damage: object, message: str
) -> None:
    path = Path(shutil.copytree(saved, tmp_path / saved.name))
    damage(path)  # type: ignore[operator]
    arguments = (config_of(Layout()), path, 1)[: 3 if load is load_and_train else 2]
    with one_rank(), pytest.raises(InputError, match=message) as caught:
        load(*arguments)  # type: ignore[operator]
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with one_rank():
        job = make(config_of(Layout()))
        monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.prepare_local_plan", full)
        with pytest.raises(InputError, match=r"step-00000001\.partial: cannot be written: rank 0: .*No space left"):
            save(job, tmp_path, 1)
    assert store.complete(tmp_path) == []


def test_progress_is_readable_by_people(saved: Path) -> None:
    progress = json.loads((saved / "progress.json").read_text())
    assert (progress["step"], progress["samples"]) == (1, 8)
    assert progress["model"] == asdict(MODEL)


def test_saving_leaves_the_job_as_it_was(tmp_path: Path) -> None:
    with one_rank():
        job = make(config_of(Layout()))
        advance(job, 0, 1)
        before = parts(job)
        save(job, tmp_path, 1)
        after = parts(job)
    assert all(before[name].values.equal(after[name].values) for name in before)


def folders(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    return tmp_path


def test_only_complete_checkpoints_are_found_oldest_first(tmp_path: Path) -> None:
    here = folders(tmp_path, "step-00000010", "step-100000000", "step-00000009", "step-00000011.partial", "step-x", "z")
    assert [path.name for path in store.complete(here)] == ["step-00000009", "step-00000010", "step-100000000"]
    assert store.complete(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (0, ["step-00000001", "step-00000002", "step-00000003"]),
        (1, ["step-00000003"]),
        (2, ["step-00000002", "step-00000003"]),
        (5, ["step-00000001", "step-00000002", "step-00000003"]),
    ],
)
def test_the_newest_are_kept_and_leftovers_removed(tmp_path: Path, keep: int, kept: list[str]) -> None:
    here = folders(tmp_path, "step-00000002", "step-00000001", "step-00000003", "step-00000004.partial", "notes")
    store.retain(here, keep)
    assert sorted(path.name for path in here.iterdir()) == ["notes", *kept]


def test_the_only_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    here = folders(tmp_path, "step-00000001", "step-00000002.partial")
    for keep in (0, 1, 2):
        store.retain(here, keep)
        assert [path.name for path in store.complete(here)] == ["step-00000001"]


def test_what_an_interrupted_save_left_is_written_anew(tmp_path: Path) -> None:
    folders(tmp_path, "step-00000001.partial")
    with one_rank():
        path = save(make(config_of(Layout())), tmp_path, 1)
    assert not (path / "data").exists()
    assert [found.name for found in tmp_path.iterdir()] == ["step-00000001"]
