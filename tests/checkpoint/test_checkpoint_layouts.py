"""Any layout loads any other's checkpoint, element by element, and training goes on as if never stopped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SIZE, Ranks
from toy_jobs import (
    MODEL,
    assemble,
    config_of,
    empty_parts,
    load_and_train,
    load_each,
    load_weights,
    make,
    one_rank,
    restorer,
    save,
    staged_bytes,
    train_and_save,
)

from megalite.base.errors import InputError
from megalite.checkpoint.store.manifest import complete
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.schema import Config, Kernels, Train
from megalite.plan.memory.held import HOST_MEMORY
from megalite.plan.memory.peak import rank_memory

PIPELINE = Layout(pp=2, dp_shard=2, tp=2)
FLAT = Layout(dp_shard=4, tp=2)
HYBRID = Layout(dp_replicate=2, dp_shard=2, tp=2)
DEEP = Layout(pp=4, dp_shard=2)
WIDE = Layout(dp_shard=SIZE)
TIED = replace(MODEL, tie_embeddings=True)
NARROW = replace(MODEL, qk_norm=True)  # norms as wide as a head: 4 elements for 8 ranks
SPLIT = replace(MODEL, norm="post", qk_norm=True, qk_norm_width="all")  # norms that tensor parallelism splits
SHAPES = {  # layout and schedule, over all ranks
    "pipeline": (PIPELINE, "1f1b"),
    "flat": (FLAT, "1f1b"),
    "hybrid": (HYBRID, "1f1b"),
    "deep": (DEEP, "zb_h1"),
    "interleaved": (PIPELINE, "interleaved_1f1b"),
    "V": (PIPELINE, "zbv"),
}


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict]]:
    """By shape: a checkpoint of a tied model after two steps, and the tensors that were there when it was written."""
    made: dict[str, tuple[Path, dict]] = {}

    def write(shape: str) -> tuple[Path, dict]:
        if shape not in made:
            folder = tmp_path_factory.mktemp(shape)
            layout, schedule = SHAPES[shape]
            wrote = ranks.run(train_and_save, config_of(layout, TIED, schedule), folder, 2)
            made[shape] = complete(folder)[-1], assemble([there for _, there in wrote])
        return made[shape]

    return write


@pytest.mark.parametrize("shape", SHAPES)
def test_any_layout_loads_any_other(shape: str, written: Callable, ranks: Ranks) -> None:
    """Weights and moments to the bit, and the copies of a tied embedding agree after one more step."""
    paths, tensors = zip(*(written(other) for other in SHAPES if other != shape), strict=True)
    layout, schedule = SHAPES[shape]
    read = ranks.run(load_each, config_of(layout, TIED, schedule), paths, 3)
    for expected, loads in zip(tensors, zip(*read, strict=True), strict=True):
        assert loads[0][0] == Progress(step=2, updates=2, samples=16, tokens=128)
        found = assemble([there for _, there, _, _ in loads])
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected)
        assert all(tensor.any() for tensor in expected.values()), "zeros would compare equal to nothing loaded"
    assert assemble([there for _, _, _, there in loads]).keys() == expected.keys()


def with_muon(config: Config) -> Config:
    return replace(config, optim=replace(config.optim, name="muon"))


def test_muon_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks.run(train_and_save, with_muon(config_of(FLAT, TIED)), tmp_path, 2)
    expected = assemble([there for _, there in wrote])
    assert {name.split()[1] for name in expected if name.endswith("q.weight momentum_buffer")} == {"momentum_buffer"}
    goes_on = {}
    for shape in ("flat", "deep", "V"):
        layout, schedule = SHAPES[shape]
        read = ranks.run(load_and_train, with_muon(config_of(layout, TIED, schedule)), complete(tmp_path)[-1], 4)
        found = assemble([there for _, there, _, _ in read])
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected)
        goes_on[shape] = assemble([there for _, _, _, there in read])
    for shape, after in goes_on.items():
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, goes_on["flat"][name], rtol=0, atol=1e-11, msg=f"{shape}: {name}")


def test_the_states_of_another_optimizer_are_refused_and_the_checkpoint_stays(tmp_path: Path) -> None:
    with one_rank():
        path = save(make(config_of(Layout())), tmp_path, 2)
        other = with_muon(config_of(Layout()))
        with pytest.raises(InputError, match=r'optim.name = "muon": the checkpoint .* has the states of adamw'):
            restorer(make(other), other).newest(tmp_path, lambda _: None)
    assert complete(tmp_path) == [path]


@pytest.mark.parametrize("shape", ["hybrid", "V"])
def test_a_save_takes_the_host_memory_that_is_predicted(shape: str, ranks: Ranks, tmp_path: Path) -> None:
    layout, schedule = SHAPES[shape]
    config = config_of(layout, TIED, schedule)
    for pp, staged in ranks.run(staged_bytes, config, tmp_path):
        assert rank_memory(config, pp).of(HOST_MEMORY) == {"checkpoint": staged}


@pytest.mark.parametrize("model", [NARROW, TIED, SPLIT], ids=["narrow norms", "tied", "split norms"])
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_layers_with_experts_go_on_in_another_layout(optimizer: str, ranks: Ranks, tmp_path: Path) -> None:
    """Weights, states and corrections, to the bit, though experts are shared out unevenly; both losses go on too."""
    losses = {"balance_loss": 0.1, "z_loss": 0.01, "correction_rate": 0.003}
    model = replace(MODEL, layers=4, experts=Experts(5, 2, 12, first_dense=1, scores="sigmoid", **losses))

    def configured(layout: Layout, schedule: str = "1f1b") -> Config:
        config = config_of(layout, model, schedule)
        return replace(config, optim=replace(config.optim, name=optimizer))

    wrote = ranks.run(train_and_save, configured(Layout(pp=2, dp_shard=2, cp=2)), tmp_path, 2, 4)
    straight = assemble([there for _, there in wrote])
    assert all(straight[f"layers.{layer}.mlp.router.correction"].any() for layer in range(1, 4))
    for shape in (configured(WIDE), configured(Layout(pp=2, dp_replicate=2, dp_shard=2), "zb_h1")):
        read = ranks.run(load_and_train, shape, complete(tmp_path)[-1], 4)
        after = assemble([there for *_, there in read])
        assert after.keys() == straight.keys()
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, straight[name], rtol=0, atol=1e-11, msg=name)
    wrote = ranks.run(train_and_save, configured(WIDE), tmp_path / "eight", 2)
    assert empty_parts([there for _, there in wrote]) > 0
    expected = assemble([there for _, there in wrote])
    with one_rank():
        _, back, _, _ = load_and_train(configured(Layout()), tmp_path / "eight/step-00000002", 2)
    assert back.keys() == expected.keys()
    assert all(back[name].values.equal(expected[name]) for name in expected)


APART = Layout(dp_shard=4, cp=2, ep=2)  # four ranks share out half of the experts: four, or three rows of each of six
OTHER = Layout(pp=2, dp_shard=2, tp=2, ep=4)
WHOLE = Layout(pp=2, dp_shard=2, cp=2)  # four ranks share out all experts


@pytest.mark.parametrize(
    ("optimizer", "momentum", "count", "before", "after"),
    [
        ("adamw", "exp_avg", 8, APART, OTHER),
        ("adamw", "exp_avg", 12, APART, WHOLE),
        ("muon", "momentum_buffer", 12, WHOLE, APART),
    ],
    ids=lambda each: str(each),
)
def test_experts_go_on_where_other_ranks_share_them_out(
    optimizer: str, momentum: str, count: int, before: Layout, after: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    """States and corrections to the bit, each with its own expert; the curve is that of a run in the second layout.

    With pipelines, states are on the host.
    """
    model = replace(MODEL, experts=Experts(count, 3, 12, balance_loss=0.1, correction_rate=0.003))

    def configured(layout: Layout) -> Config:
        config = config_of(layout, model)
        return replace(
            config,
            optim=replace(config.optim, name=optimizer, clip_norm=0.0, placement="host" if layout.pp > 1 else "device"),
        )

    other = configured(after)
    wrote = ranks.run(train_and_save, configured(before), tmp_path, 2)
    straight = ranks.run(train_and_save, other, tmp_path / "straight", 2, 4)
    read = ranks.run(load_and_train, other, tmp_path / "step-00000002", 4)
    expected, loaded = assemble([there for _, there in wrote]), assemble([there for _, there, _, _ in read])
    assert expected.keys() == loaded.keys()
    assert [name for name, tensor in expected.items() if not tensor.equal(loaded[name])] == []
    states = expected[f"layers.1.mlp.experts.gate.weight {momentum}"]
    assert len({tuple(state.flatten().tolist()) for state in states}) == count
    assert expected["layers.1.mlp.router.correction"].any()
    assert read[0][2] == pytest.approx(straight[0][0][2:], rel=1e-13)
    resumed, whole = assemble([there for *_, there in read]), assemble([there for _, there in straight])
    for name, tensor in resumed.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-12, msg=name)


def test_parts_of_experts_are_converted_and_read_again(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks have three rows or columns of each of three experts."""
    model = replace(MODEL, qkv_bias=False, ffn=12, experts=Experts(6, 3))
    config, target = config_of(Layout(dp_shard=8, ep=2), model), tmp_path / "theirs"
    wrote = ranks.run(train_and_save, config, tmp_path, 1)
    found = open_weights(str(complete(tmp_path)[-1]))
    convert(found, plan_of("hf", found, target, Wanted()), target, {})
    read = ranks.run(load_weights, config, target)
    expected, again = assemble([there for _, there in wrote]), assemble([there for there, _ in read])
    assert [name for name, tensor in again.items() if not tensor.equal(expected[name])] == []


@pytest.mark.parametrize("in_background", [True, False], ids=["async", "at once"])
@pytest.mark.parametrize("layout", [PIPELINE, HYBRID], ids=str)
def test_resuming_in_the_same_layout_changes_no_bit(
    layout: Layout, in_background: bool, ranks: Ranks, tmp_path: Path
) -> None:
    config = config_of(layout, TIED)
    config.checkpoint.async_ = in_background
    whole = ranks.run(train_and_save, config, tmp_path, 3, 6)
    second = ranks.run(load_and_train, config, tmp_path / "step-00000003", 6)
    assert whole[0][0][3:] == second[0][2]
    expected, found = assemble([there for _, there in whole]), assemble([there for _, _, _, there in second])
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize(
    ("before", "after", "adamw", "steps"),
    [
        (PIPELINE, FLAT, "auto", 6),
        (WIDE, DEEP, "auto", 6),
        (PIPELINE, WIDE, "triton", 4),
    ],  # interpreted: a step is slow
    ids=["3D to flat", "flat to pipeline", "3D to flat, another optimizer's kernels"],
)
def test_resuming_in_another_layout_changes_only_rounding(
    before: Layout, after: Layout, adamw: Any, steps: int, ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks.run(train_and_save, config_of(before, NARROW), tmp_path, 3, steps)
    resumed = replace(config_of(after, NARROW), kernels=Kernels(adamw=adamw))
    second = ranks.run(load_and_train, resumed, tmp_path / "step-00000003", steps)
    assert whole[0][0][3:] == pytest.approx(second[0][2], rel=1e-10)
    expected, found = assemble([there for _, there in whole]), assemble([there for _, _, _, there in second])
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() <= 1e-10 * tensor.abs().max(), name


def with_precision(config: Config, precision: str) -> Config:
    return replace(config, train=Train(steps=6, precision=precision))  # type: ignore[arg-type]


@pytest.mark.parametrize(("saved", "loaded"), [("fp64", "bf16"), ("bf16", "fp64"), ("fp32", "bf16")])
def test_the_precision_of_compute_may_change(saved: str, loaded: str, ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks.run(train_and_save, with_precision(config_of(PIPELINE), saved), tmp_path, 2)
    read = ranks.run(load_and_train, with_precision(config_of(FLAT), loaded), tmp_path / "step-00000002", 3)
    expected, found = assemble([there for _, there in wrote]), assemble([there for _, there, _, _ in read])
    for name, tensor in expected.items():
        assert found[name].equal(tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_states_in_host_memory_are_saved_and_filled(name: Any, ranks: Ranks, tmp_path: Path) -> None:
    on_host, on_device = config_of(PIPELINE), config_of(FLAT)
    on_host.optim.name = on_device.optim.name = name
    on_host.optim.placement = "host"
    wrote = ranks.run(train_and_save, on_host, tmp_path, 2)
    read = ranks.run(load_and_train, on_device, tmp_path / "step-00000002", 2)
    back = ranks.run(load_and_train, on_host, tmp_path / "step-00000002", 2)
    expected = assemble([there for _, there in wrote])
    for found in (assemble([there for _, there, _, _ in ran]) for ran in (read, back)):
        assert all(expected[name].equal(found[name]) for name in expected)


def test_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks.run(train_and_save, config_of(HYBRID, NARROW), tmp_path, 2)
    read = ranks.run(load_weights, config_of(PIPELINE, NARROW), tmp_path / "step-00000002")
    assert all(untouched for _, untouched in read)
    expected, found = assemble([there for _, there in wrote]), assemble([there for there, _ in read])
    assert all(expected[name].equal(tensor) for name, tensor in found.items())
