"""States of the optimizer go to Megatron's `torch_dist` and back, and a run resumes from them to the bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_files import SMALL, dist_tensors, random_weights, write_dist
from toy_jobs import config_of, load_and_train, one_rank, train_and_save

from megalite.base.errors import InputError
from megalite.checkpoint.run.same_run import refuse_other_data
from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.manifest import Manifest
from megalite.checkpoint.weights import convert as engine
from megalite.checkpoint.weights import sources
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import torch_dist
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.schema import Config

AT, STEPS = 3, 6


def config(optimizer: str = "adamw", experts: Experts | None = None) -> Config:
    found = config_of(Layout())
    found.model.experts = experts
    found.train.precision, found.optim.name = "fp32", optimizer  # type: ignore[assignment]
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a run at step `AT`."""
    with one_rank():
        train_and_save(config(), tmp_path, AT)
    return tmp_path / f"step-{AT:08d}"


def converted(source: str, target: str, **wanted: Any) -> Path:
    kind, _, path = target.partition(":")
    found = open_weights(source, states=True)
    convert(found, plan_of(kind, found, Path(path), Wanted(**wanted)), Path(path), {})
    return Path(path)


CORRECTED = Experts(count=4, width=16, scores="sigmoid", correction_rate=0.01, shared_width=16, shared_gate=True)


@pytest.mark.parametrize("experts", [None, CORRECTED], ids=["dense", "corrected experts"])
@pytest.mark.parametrize("way", [["megalite"], ["megatron-dist", "megalite"]], ids="-".join)
def test_a_run_goes_on_as_if_nothing_had_been(way: list[str], experts: Experts | None, tmp_path: Path) -> None:
    with one_rank():
        losses, expected = train_and_save(config(experts=experts), tmp_path, AT, STEPS)
        saved = tmp_path / f"step-{AT:08d}"
        text = f"megalite:{saved}"
        for number, kind in enumerate(way):
            folder = tmp_path / f"{number}" / saved.name
            folder.parent.mkdir()
            text = f"{kind}:{converted(text, f'{kind}:{folder}', files=2 if kind == 'megalite' else 1)}"
        _, loaded, found, after = load_and_train(config(experts=experts), folder, STEPS)
    assert found == losses[AT:]
    assert after.keys() == expected.keys()
    assert experts is None or loaded["layers.0.mlp.router.correction"].values.abs().max() > 0
    assert all(torch.equal(after[name].values, part.values) for name, part in expected.items())


def test_megatron_finds_them_under_its_names(saved: Path, tmp_path: Path) -> None:
    """Compared with what PyTorch loads; the values are put into Megatron's order by plain torch."""
    model = config().model
    folder = converted(f"megalite:{saved}", f"megatron-dist:{tmp_path / 'to'}", dtype="bfloat16") / "iter_0000003"
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    with one_rank():
        _, ours = train_and_save(config(), tmp_path / "again", AT)
    for theirs, state in {"fp32_param": "", "param": "", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
        values = {name.split()[0]: part.values for name, part in ours.items() if name.partition(" ")[2] == state}
        expected = {
            f"optimizer.state.{theirs}.{name}": tensor for name, tensor in dist_tensors(model, values, 1).items()
        }
        loaded = {name: torch.zeros(padded(name, tensor)) for name, tensor in expected.items()}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(loaded[name][: len(tensor)], tensor) for name, tensor in expected.items())
    common = torch.load(folder / "common.pt", weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["weight_decay"], group["step"]) for group in groups] == [
        (1.0, 0.1, 3),
        (0.0, 0.0, 3),
    ]
    assert common["iteration"] == 3
    assert common["args"].consumed_train_samples == common["opt_param_scheduler"]["num_steps"] == 24


def padded(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    return (128, *tensor.shape[1:]) if "embedding" in name or "output_layer" in name else tuple(tensor.shape)


def test_a_run_resumes_from_a_folder_that_megatron_has_saved(tmp_path: Path) -> None:
    model = replace(SMALL, sequence_length=32)
    states = {
        f"optimizer.state.{kind}.{name}": tensor.abs()
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for name, tensor in dist_tensors(model, random_weights(model)).items()
    }
    write_dist(tmp_path / "theirs", model, random_weights(model, torch.bfloat16), **states)
    target = converted(f"megatron-dist:{tmp_path / 'theirs'}", f"megalite:{tmp_path / 'step-00000010'}")
    manifest = Manifest.read(target)
    assert (manifest.step, manifest.tokens, manifest.foreign, manifest.data) == (10, 640 * 32, True, ())
    found = replace(config(), model=model)
    with one_rank():
        progress, loaded, losses, _ = load_and_train(found, target, 11)
    assert (progress.step, progress.updates, progress.samples) == (10, 10, 640)
    name = "layers.2.mlp.down.weight"
    expected = random_weights(model)[name].abs()
    assert torch.equal(loaded[name].values, expected)
    assert torch.equal(loaded[f"{name} exp_avg_sq"].values, expected)
    assert len(losses) == 1


def test_the_length_of_samples_is_that_of_training(tmp_path: Path) -> None:
    """Which need not be the longest that the model allows."""
    path = theirs("plain", tmp_path / "theirs")
    file = path / "iter_0000010" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].seq_length = 16
    torch.save(common, file)
    target = converted(f"megatron-dist:{path}", f"megalite:{tmp_path / 'to'}")
    manifest = Manifest.read(target)
    assert (manifest.tokens, manifest.configuration.model.sequence_length) == (640 * 16, 16)
    refuse_other_data(target, manifest, replace(config(), model=replace(SMALL, sequence_length=16)), ())
    with pytest.raises(InputError, match=r"model\.sequence_length = 32"):
        refuse_other_data(target, manifest, replace(config(), model=SMALL), ())


def test_samples_left_out_stay_left_out(saved: Path, tmp_path: Path) -> None:
    """And all else of the progress, unless Megatron has gone on."""
    found = open_weights(f"megalite:{saved}", states=True)
    assert found.training is not None
    progress = replace(found.training.progress, left_out=((24, 32),), tokens=100, bad_steps=2, losses=(3.0, 2.5))
    found = replace(found, training=replace(found.training, progress=progress))
    convert(found, plan_of("megatron-dist", found, tmp_path / "to", Wanted()), tmp_path / "to", {})
    again = open_weights(f"megatron-dist:{tmp_path / 'to'}", states=True).training
    assert again is not None
    assert again.progress == progress
    file = tmp_path / "to" / "iter_0000003" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].consumed_train_samples += 8
    torch.save(common, file)
    other = open_weights(f"megatron-dist:{tmp_path / 'to'}", states=True).training
    assert other is not None
    assert (other.progress.left_out, other.progress.samples, other.progress.tokens) == ((), 32, 32 * 8)


def test_a_run_in_float64_stays_one_or_becomes_another(tmp_path: Path) -> None:
    wide, narrow = config(), config()
    wide.train.precision = "fp64"
    with one_rank():
        train_and_save(wide, tmp_path, AT)
        source = f"megalite:{tmp_path / 'step-00000003'}"
        for dtype, found in (("float64", wide), ("float32", narrow)):
            target = converted(source, f"megalite:{tmp_path / dtype}", dtype=dtype)
            assert Manifest.read(target).configuration.train.precision == found.train.precision
            assert load_and_train(found, target, AT + 1)[0].step == AT


def test_states_that_are_no_weights_are_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "COMPLETE_STATES", ({"exp_avg"},))
    with pytest.raises(DamagedError, match=r"index\.bin has not all states of embed\.weight"):
        open_weights(f"megalite:{saved}", states=True)


def test_what_was_stopped_is_not_mixed_with_another_progress(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = converted(f"megalite:{saved}", f"megatron-dist:{tmp_path / 'dist'}")
    target, publish = tmp_path / "step-00000003-again", engine._publish

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_publish", stopped)
    with pytest.raises(KeyboardInterrupt):
        converted(f"megatron-dist:{dist}", f"megalite:{target}")
    file = dist / "iter_0000003" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].consumed_train_samples += 8
    torch.save(common, file)
    monkeypatch.setattr(engine, "_publish", publish)
    converted(f"megatron-dist:{dist}", f"megalite:{target}")
    assert Checkpoint(target).progress()[0].samples == 32  # type: ignore[index]


def test_samples_of_another_length_are_refused(saved: Path, tmp_path: Path) -> None:
    there = converted(f"megalite:{saved}", f"megatron-dist:{tmp_path / 'dist'}")
    target = converted(f"megatron-dist:{there}", f"megalite:{tmp_path / saved.name}" + "-back")
    other = replace(config(), model=replace(config().model, sequence_length=16))
    with pytest.raises(InputError, match=r"model\.sequence_length = 16"):
        refuse_other_data(target, Manifest.read(target), other, ())


@pytest.mark.parametrize(
    ("source", "target", "wanted", "message"),
    [
        ("megalite", "hf:to", {}, "--to hf:.*has no place for an optimizer's states; leave --optimizer out"),
        ("megalite", "meta:to", {}, "has no place for an optimizer's states"),
        ("megalite", "megatron:to", {}, "megatron-dist names them"),
        ("megalite", "megalite:to", {"dtype": "bfloat16"}, "all of float32 or all of float64, so use --dtype fp32"),
        ("megalite", "megalite:step-00000004", {}, "the run is at step 3; call it step-00000003"),
        ("weights", "megalite:to", {}, "holds weights only, no states"),
        ("dist", "megalite:to", {}, "holds no states of an optimizer; leave --optimizer out"),
        ("buckets", "megalite:to", {}, "--dist-ckpt-optim-fully-reshardable"),
        ("sgd", "megalite:to", {}, "optimizer = 'sgd': only states of adam can be taken along"),
        ("no count", "megalite:to", {}, "iteration = 'ten': must be a count"),
        ("another iteration", "megalite:to", {}, "common.pt is of iteration 11, not of its folder's"),
        ("endless", "megalite:to", {}, r"means .* tokens; a run has fewer than 2\*\*62"),
        ("nested", "megalite:to", {}, r"optimizer = \[\[\["),
        ("half", "megalite:to", {}, "its main weight, of optimizer.state.*, is missing"),
        ("one kind", "megalite:to", {}, "holds no optimizer.state.exp_avg_sq.*, without which AdamW cannot go on"),
        ("betas", "megalite:to", {}, "args mean an optimizer that cannot be: optim.betas"),
        ("NaN", "megalite:to", {}, "optimizer.exp_avg_sq.*: has NaN or infinity in it"),
        ("negative", "megalite:to", {}, "optimizer.exp_avg_sq.*: has negative squares"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    source: str, target: str, wanted: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    text = f"megalite:{saved}"
    if source == "weights":
        weights = open_weights(text)
        convert(weights, plan_of("megalite", weights, tmp_path / "w", Wanted()), tmp_path / "w", {})
        text = f"megalite:{tmp_path / 'w'}"
    elif source != "megalite":
        text = f"megatron-dist:{theirs(source, tmp_path / 'theirs')}"
    kind, _, name = target.partition(":")
    with pytest.raises(InputError, match=message):
        converted(text, f"{kind}:{tmp_path / 'made' / name}", **wanted)
    assert not any((tmp_path / "made").iterdir())


def theirs(kind: str, path: Path) -> Path:
    """A folder of Megatron whose states cannot be taken along."""
    more: dict[str, torch.Tensor] = {}
    if kind != "dist":
        ours = random_weights(SMALL)
        more = {
            f"optimizer.state.{name}.{key}": tensor.abs()
            for name in ("exp_avg", "exp_avg_sq")
            for key, tensor in dist_tensors(SMALL, ours).items()
            if (kind, name) != ("one kind", "exp_avg_sq")
        }
    if kind == "buckets":
        more = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.zeros(8)}
    if kind in ("NaN", "negative"):
        more["optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"][3] = float("nan") if kind == "NaN" else -1.0
    write_dist(path, SMALL, random_weights(SMALL, torch.bfloat16 if kind == "half" else torch.float32), **more)
    file = path / "iter_0000010" / "common.pt"
    common = torch.load(file, weights_only=False)
    match kind:
        case "sgd":
            common["args"].optimizer = "sgd"
        case "nested":
            common["args"].optimizer = nested = []
            for _ in range(200):
                nested.append([])
                nested = nested[0]
        case "no count":
            common["iteration"] = "ten"
        case "another iteration":
            common["iteration"] = 11
        case "endless":
            common["args"].consumed_train_samples, common["args"].seq_length = (1 << 40) - 1, (1 << 31) - 1
        case "betas":
            common["args"].adam_beta1 = 1.5
    torch.save(common, file)
    return path


def test_muon_has_no_place_in_megatron(tmp_path: Path) -> None:
    with one_rank():
        train_and_save(config("muon"), tmp_path, AT)
    with pytest.raises(InputError, match=r"has optimizer\.momentum_buffer\..*Megatron's AdamW has no place for it"):
        converted(f"megalite:{tmp_path / 'step-00000003'}", f"megatron-dist:{tmp_path / 'to'}")
    same = converted(f"megalite:{tmp_path / 'step-00000003'}", f"megalite:{tmp_path / 'same'}")
    assert json.loads((same / "manifest.json").read_text())["step"] == AT


def test_a_count_of_updates_is_read_wherever_it_is(tmp_path: Path) -> None:
    ours = random_weights(SMALL)
    more = {
        f"optimizer.state.{name}.{key}": tensor
        for name in ("exp_avg", "exp_avg_sq")
        for key, tensor in dist_tensors(SMALL, ours).items()
    }
    write_dist(tmp_path, SMALL, ours, **more)
    file = tmp_path / "iter_0000010" / "common.pt"
    common = torch.load(file, weights_only=False)
    for optimizer in (
        {"optimizer": {"param_groups": [{"step": 7}]}},
        {"optimizer": {"state": {"common_step": torch.tensor(7.0)}}},
        {"state": {"common_step": 7}},
    ):
        torch.save(common | {"optimizer": optimizer}, file)
        found = torch_dist.open_folder(tmp_path, states=True)
        assert found.training is not None
        assert found.training.progress.updates == 7
