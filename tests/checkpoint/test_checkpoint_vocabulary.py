"""Checkpoints and exports of a vocabulary that is padded have its true size in any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ranks
from torch.distributed.tensor import DTensor
from toy_jobs import (
    MODEL,
    Parts,
    advance,
    assemble,
    config_of,
    load_and_train,
    make,
    one_rank,
    parts,
    restorer,
    save,
    train_and_save,
)

from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.state import State
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.train.build import Job

ODD = replace(MODEL, vocab_size=33, heads=8, kv_heads=8, qkv_bias=False)
TIED = replace(ODD, tie_embeddings=True)
TINY = replace(ODD, vocab_size=5)  # three of eight ranks have padding alone
LAYOUTS = {
    "tp 2": (Layout(dp_shard=4, tp=2), "1f1b"),  # four shards of 18 rows are not those of 15 rows and three of padding
    "tp 4, both ends of a V": (Layout(pp=2, tp=4), "zbv"),
    "tp 8": (Layout(tp=8), "1f1b"),
}


def configured(layout: Layout, model: Model, schedule: str = "1f1b") -> Config:
    config = config_of(layout, model, schedule)
    config.model = replace(model, layers=4)
    config.parallel.pipeline.split = None
    config.train.precision = "fp32"
    config.checkpoint.export, config.checkpoint.export_every, config.checkpoint.interval = "hf", 2, 2
    return config


def begin(config: Config, folder: Path) -> Parts:
    job = make(config)
    advance(job, 0, 2)
    save(job, folder / "checkpoints", 2)
    return parts(job)


def filled(config: Config) -> Job:
    """A job with other weights and moments than any that is loaded."""
    job = make(config)
    for tensor in State(job.stages, job.optimizer).tensors().values():
        assert isinstance(tensor, DTensor)
        tensor.to_local().fill_(7)
    return job


def pass_on(config: Config, source: Path, folder: Path) -> Parts:
    """Load a checkpoint and save it again."""
    job = filled(config)
    restorer(job, config).all(source / "checkpoints/step-00000002")
    save(job, folder / "checkpoints", 2)
    return parts(job)


def read(config: Config, source: Path) -> Parts:
    """The weights of an export."""
    job = make(replace(config, run=replace(config.run, seed=99)))
    restorer(job, config).weights(f"hf:{source / 'export/step-00000002'}")
    return {name: part for name, part in parts(job).items() if " " not in name}


def exported(folder: Path) -> bytes:
    return (folder / "export/step-00000002/model.safetensors").read_bytes()


@pytest.mark.parametrize("model", [ODD, TIED, TINY], ids=["odd", "tied", "tiny"])
def test_it_goes_from_layout_to_layout_without_a_difference(model: Model, ranks: Ranks, tmp_path: Path) -> None:
    """From one rank through all layouts, and as an export to each: weights, moments and files are the same."""
    source = tmp_path / "one"
    with one_rank():
        expected = {name: part.values for name, part in begin(configured(Layout(), model), source).items()}
    assert all(tensor.any() for tensor in expected.values())
    weights, files = {name for name in expected if " " not in name}, exported(source)
    for name, (layout, schedule) in LAYOUTS.items():
        config, target = configured(layout, model, schedule), tmp_path / name
        found = assemble(ranks.run(pass_on, config, source, target))
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            name: tuple(tensor.shape) for name, tensor in expected.items()
        }
        assert all(expected[name].equal(found[name]) for name in expected), name
        assert Checkpoint(target / "checkpoints/step-00000002").tensors["model.embed.weight"].shape == (
            model.vocab_size,
            model.width,
        )
        assert exported(target) == files
        again = assemble(ranks.run(read, config, target))
        assert again.keys() == weights
        assert all(expected[name].equal(again[name]) for name in weights), name
        source = target
    with one_rank():
        back = pass_on(configured(Layout(), model), source, tmp_path / "back")
    assert all(expected[name].equal(back[name].values) for name in expected)


def test_training_goes_on_with_another_tp(ranks: Ranks, tmp_path: Path) -> None:
    layout = Layout(dp_shard=4, tp=2)
    with one_rank():
        losses, expected = train_and_save(config_of(Layout(), TIED), tmp_path, 2, 4)
    found = ranks.run(load_and_train, config_of(layout, TIED), tmp_path / "step-00000002", 4)
    assert found[0][2] == pytest.approx(losses[2:], rel=1e-12)
    for name, tensor in assemble([there for *_, there in found]).items():
        assert (tensor - expected[name].values).abs().max() <= 1e-10 * tensor.abs().max(), name
