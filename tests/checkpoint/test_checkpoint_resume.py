"""Which checkpoint a run may continue from, which stay, and what must be the same in both."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.checkpoint.run.resume import check_start, starting_point
from megalite.checkpoint.run.same_run import refuse_other_data, refuse_other_model, refuse_other_weights
from megalite.checkpoint.store.disk import DamagedError, File, share_of
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, Manifest, Source, complete
from megalite.checkpoint.store.retain import damaged, retain, set_aside
from megalite.config.convert import to_plain
from megalite.config.model_schema import Attention, Experts, Model, MultiToken, RopeScaling
from megalite.config.schema import Checkpoint, Config, Run

MODEL = Model(layers=2, width=16)
CONFIG = Config(model=MODEL, run=Run(seed=3))
DATA = (Source("data/a", 0.75, 1000, "aa"), Source("data/b", 0.25, 500, "bb"))
MADE = Manifest(
    step=10,
    tokens=1280,
    saved="2026-01-02T03:04:05+00:00",
    ranks=2,
    layout={"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1},
    versions={"megalite": "0.1.0"},
    config=to_plain(CONFIG),
    data=DATA,
    files={name: File(3, "0f" * 16) for name in (INDEX, "__0_0.distcp")},
)


def refused(refuse: Callable[..., None], *arguments: object) -> list[str]:
    """The keys that are refused."""
    try:
        refuse(*arguments)
    except InputError as error:
        return [problem.key for problem in error.problems]
    return []


def put(folder: Path, step: int, manifest: Manifest = MADE) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(replace(manifest, step=step).render())
    return path


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Manifest.read(put(tmp_path, 10)) == MADE
    assert MADE.configuration == CONFIG


def test_keys_that_came_later_have_their_defaults(tmp_path: Path) -> None:
    old = to_plain(CONFIG)
    del old["model"]["qk_norm"]
    old["model"]["forgotten"] = 1
    assert replace(MADE, config=old).configuration == CONFIG


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step": 1}', '{"digest": "x"}', "\xff"])
def test_what_is_no_manifest_is_damage(text: str, tmp_path: Path) -> None:
    path = put(tmp_path, 10)
    (path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        Manifest.read(path)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (replace(MODEL, vocab_size=64), ["vocab_size"]),
        (replace(MODEL, layers=3, ffn=48, qkv_bias=True), ["layers", "ffn", "qkv_bias"]),
        (replace(MODEL, rope_theta=5e5, norm_eps=1e-6), ["rope_theta", "norm_eps"]),  # the same shapes
        (replace(MODEL, rope_scaling=RopeScaling()), ["rope_scaling"]),
        (replace(MODEL, attention=Attention(nope_every=2)), ["attention.nope_every"]),
        (replace(MODEL, norm="post"), ["norm"]),  # weights of the same names and shapes
        (replace(MODEL, qk_norm=True, qk_norm_width="all"), ["qk_norm", "qk_norm_width"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_model_is_refused_with_every_difference(model: Model, keys: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        refuse_other_model(Path("runs/a/checkpoints/step-00000010"), CONFIG.model, Config(model=model))
    assert [problem.key for problem in caught.value.problems] == [f"model.{key}" for key in keys]
    assert "runs/a/checkpoints/step-00000010" in str(caught.value)


def test_a_checkpoint_from_before_kinds_of_scaling_is_of_llama3s() -> None:
    old = to_plain(Config(model=replace(MODEL, rope_scaling=RopeScaling())))
    for key in ("kind", "beta_fast", "beta_slow", "attention_factor"):
        del old["model"]["rope_scaling"][key]
    there = replace(MADE, config=old).configuration.model
    assert refused(refuse_other_model, Path("x"), there, Config(model=replace(MODEL, rope_scaling=RopeScaling()))) == []
    yarn = Config(model=replace(MODEL, rope_scaling=RopeScaling("yarn")))
    assert refused(refuse_other_model, Path("x"), there, yarn) == ["model.rope_scaling.kind"]


def test_only_new_runs_may_leave_out_layers_of_multi_token_prediction() -> None:
    """The factor of their losses may change in both; more layers than the checkpoint has are in no case there."""
    there = replace(MODEL, mtp=MultiToken(2))
    same, fewer, none, more = (
        Config(model=replace(MODEL, mtp=mtp)) for mtp in (MultiToken(2, 0.1), MultiToken(1), None, MultiToken(3))
    )
    found = [
        [refused(refuse, Path("x"), there, config) for config in (same, fewer, none, more)]
        for refuse in (refuse_other_weights, refuse_other_model)
    ]
    depth = ["model.mtp.depth"]
    assert found == [[[], [], [], depth], [[], depth, ["model.mtp"], depth]]
    assert refused(refuse_other_weights, Path("x"), MODEL, same) == ["model.mtp"]


def test_weights_do_not_depend_on_sequence_length_and_initialization() -> None:
    assert (
        refused(
            refuse_other_model, Path("x"), CONFIG.model, Config(model=replace(MODEL, sequence_length=16, init_std=1))
        )
        == []
    )


def test_weights_do_not_depend_on_losses_of_a_router() -> None:
    there = replace(MODEL, experts=Experts(width=MODEL.ffn))
    here = replace(MODEL, experts=Experts(balance_loss=0.01, z_loss=0.001))
    assert refused(refuse_other_model, Path("x"), there, Config(model=here)) == []
    corrected = [replace(MODEL, experts=Experts(correction_rate=rate)) for rate in (0.001, 0.0)]
    assert refused(refuse_other_model, Path("x"), corrected[0], Config(model=corrected[1])) == []
    keys = ["model.experts.correction_rate"]
    assert refused(refuse_other_model, Path("x"), there, Config(model=corrected[1])) == keys
    here = replace(here, experts=Experts(width=1, normalize=False))
    keys = ["model.experts.width", "model.experts.normalize"]
    assert refused(refuse_other_model, Path("x"), there, Config(model=here)) == keys


@pytest.mark.parametrize(
    ("config", "data", "keys"),
    [
        (replace(CONFIG, run=Run(seed=4)), DATA, ["run.seed"]),
        (replace(CONFIG, model=replace(MODEL, sequence_length=128)), DATA, ["model.sequence_length"]),
        (CONFIG, DATA[:1], ["data.train"]),
        (CONFIG, (DATA[1], DATA[0]), ["data.train"]),
        (CONFIG, (DATA[0], replace(DATA[1], weight=0.5)), ["data.train"]),
        (CONFIG, (DATA[0], replace(DATA[1], fingerprint="cc")), ["data.train[1].path"]),
        (replace(CONFIG, run=Run(seed=4)), DATA[:1], ["run.seed", "data.train"]),
    ],
    ids=["seed", "length", "fewer", "order", "weights", "content", "two"],
)
def test_other_samples_are_refused_by_name(config: Config, data: tuple[Source, ...], keys: list[str]) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.weights") as caught:
        refuse_other_data(Path("step-00000010"), MADE, config, data)
    assert [problem.key for problem in caught.value.problems] == keys


def test_the_same_data_elsewhere_and_in_other_batches_goes_on() -> None:
    config = replace(CONFIG, batch=replace(CONFIG.batch, micro=2, global_=64))
    moved = tuple(replace(source, path=f"/new/{source.path}", weight=4 * source.weight) for source in DATA)
    assert refused(refuse_other_data, Path("step-00000010"), MADE, config, moved) == []


def refusal(folder: Path, **keys: str) -> str:
    """What `check_start` says against a start with these keys of `checkpoint`; empty: the run may begin."""
    try:
        check_start(replace(CONFIG, checkpoint=Checkpoint(**keys)), folder)  # type: ignore[arg-type]
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_fresh_folder_may_begin(resume: str, tmp_path: Path) -> None:
    assert refusal(tmp_path / "checkpoints", resume=resume) == ""


def test_a_run_is_not_begun_anew_over_its_checkpoints(tmp_path: Path) -> None:
    put(tmp_path, 10)
    assert refusal(tmp_path, resume="auto") == ""
    assert f"checkpoint.resume = never, but {tmp_path} holds step-00000010" in refusal(tmp_path, resume="never")


def test_an_older_checkpoint_does_not_go_under_newer_ones(tmp_path: Path) -> None:
    older, newer = put(tmp_path, 10), put(tmp_path, 20)
    assert "already holds step-00000020, which is newer" in refusal(tmp_path, resume=str(older))
    assert refusal(tmp_path / "another", resume=str(older)) == ""
    assert refusal(tmp_path, resume=str(newer)) == ""


@pytest.mark.parametrize(
    ("key", "told"),
    [("resume", "is not a checkpoint: "), ("weights", "holds no weights of a known kind; say which as KIND:PATH")],
)
def test_a_path_must_be_a_checkpoint_of_this_model(key: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal(tmp_path / "run", **{key: str(tmp_path / "empty")})
    assert said.startswith(f"checkpoint.{key}: ")
    assert told in said
    other = put(tmp_path, 10, replace(MADE, config=to_plain(Config(model=replace(MODEL, ffn=99)))))
    assert "model.ffn" in refusal(tmp_path / "run", **{key: str(other)})


def test_a_check_refuses_what_the_start_would(tmp_path: Path) -> None:
    path = put(tmp_path, 10)
    for name in MADE.files:
        (path / name).write_bytes(b"abc")
    config = replace(CONFIG, checkpoint=Checkpoint(resume="auto"))
    assert starting_point(config, tmp_path, DATA) == 10
    muon = replace(config, optim=replace(config.optim, name="muon"))
    for resume in ("auto", str(path)):
        with pytest.raises(InputError, match=r"optim\.name = \"muon\": the checkpoint .* has the states of adamw"):
            starting_point(replace(muon, checkpoint=Checkpoint(resume=resume)), tmp_path, DATA)
    (path / INDEX).write_bytes(b"too long")
    with pytest.raises(InputError, match="holds no intact checkpoint, but step-00000010, which is damaged"):
        starting_point(config, tmp_path, DATA)
    path.rename(tmp_path / "step-00000010.damaged")
    with pytest.raises(InputError, match=r"holds no intact checkpoint, but step-00000010\.damaged"):
        starting_point(config, tmp_path, DATA)


def test_weights_are_not_looked_at_once_a_run_has_its_own_checkpoints(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert refusal(tmp_path / "another", weights=gone) != ""
    put(tmp_path, 10)
    assert refusal(tmp_path, weights=gone) == ""


def folders(parent: Path, *names: str) -> Path:
    for name in names:
        (parent / name).mkdir()
        (parent / name / "data").touch()
    return parent


def test_only_complete_checkpoints_are_found_oldest_first(tmp_path: Path) -> None:
    here = folders(tmp_path, "step-00000010", "step-100000000", "step-00000009", "step-00000011.partial", "step-x", "z")
    assert [path.name for path in complete(here)] == ["step-00000009", "step-00000010", "step-100000000"]
    assert complete(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("keep", "every", "kept"),
    [
        (0, 0, [1, 2, 3, 4, 5, 6]),
        (1, 0, [6]),
        (2, 0, [5, 6]),
        (9, 0, [1, 2, 3, 4, 5, 6]),
        (1, 2, [2, 4, 6]),
        (2, 3, [3, 5, 6]),
        (0, 2, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_every_nth_are_kept(tmp_path: Path, keep: int, every: int, kept: list[int]) -> None:
    here = folders(tmp_path, *(f"step-{step:08d}" for step in (2, 1, 3, 6, 5, 4)))
    retain(here, 6, keep, every)
    assert [path.name for path in complete(here)] == [f"step-{step:08d}" for step in kept]
    assert len(list(here.iterdir())) == len(kept)


def test_incomplete_ones_do_not_count_and_go(tmp_path: Path) -> None:
    names = ["step-00000001", "step-00000002", "step-00000003.partial", "step-00000004.deleted"]
    here = folders(tmp_path, *names, "step-00000005.damaged", "step-00000006.damaged.2", "notes", "step-x.partial")
    retain(here, 6, 2, 0)
    assert {path.name for path in here.iterdir()} == {
        "step-00000001",
        "step-00000002",
        "step-00000005.damaged",  # people decide
        "step-00000006.damaged.2",
        "notes",
        "step-x.partial",
    }
    assert [path.name for path in damaged(here)] == ["step-00000005.damaged", "step-00000006.damaged.2"]


def test_what_cannot_go_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the names that others have left, nor a folder that stays, is in the way of the rest."""
    here = folders(tmp_path, *(f"step-0000000{step}" for step in (1, 2, 3, 4)), "step-00000002.deleted")
    delete = shutil.rmtree

    def refused(path: Path) -> None:
        if path.name.startswith("step-00000001.") or path.name == "step-00000002.deleted":
            raise PermissionError(errno.EACCES, "denied")
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", refused)
    left = [here / f"step-0000000{step}.deleted" for step in (1, 2)]
    assert retain(here, 4, 1, 0) == [f"{path} cannot be deleted: denied" for path in left]
    assert {path.name for path in here.iterdir()} == {"step-00000001.deleted", "step-00000002.deleted", "step-00000004"}


def test_what_is_not_of_this_run_is_neither_deleted_nor_counted(tmp_path: Path) -> None:
    """Links, files, and steps that this run has not come to: none of them takes the place of a checkpoint."""
    here = folders(tmp_path, "step-00000001", "step-00000002", "step-00000003", "step-00000009")
    elsewhere = folders(tmp_path, "elsewhere") / "elsewhere"
    for name in ("step-00000004", "step-00000005.partial", "step-00000006.deleted"):
        (here / name).symlink_to(elsewhere)
    (here / "step-00000007").touch()
    retain(here, 3, 1, 0)
    assert {path.name for path in complete(here)} == {f"step-0000000{step}" for step in (3, 4, 7, 9)}
    assert (elsewhere / "data").exists()


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_deletion_leaves_nothing_that_looks_whole(
    interrupted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folders(tmp_path, "step-00000001", "step-00000002", "step-00000003")
    calls: list[Path] = []

    def killed(path: Path) -> None:
        calls.append(path)
        if len(calls) > interrupted:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            retain(here, 3, 1, 0)
    assert [path.name for path in complete(here)] == ["step-00000003"]
    retain(here, 3, 1, 0)
    assert [path.name for path in here.iterdir()] == ["step-00000003"]


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    aside = [set_aside(folders(tmp_path, "step-00000001") / "step-00000001").name for _ in range(3)]
    assert aside == ["step-00000001.damaged", "step-00000001.damaged.2", "step-00000001.damaged.3"]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_every_file_is_hashed_by_one_rank_and_none_by_much_more_than_its_share(sizes: list[int], ranks: int) -> None:
    files = {str(number): File(size, "") for number, size in enumerate(sizes)}
    shares = [share_of(files, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(file.bytes for file in share.values()) for share in shares]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)
