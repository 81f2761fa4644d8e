"""Rules of experts, which layers have them, and how ranks shard them."""

from dataclasses import replace

import pytest

from megalite.config.layers import Mixture, SwiGLU, layer_kinds
from megalite.config.model_schema import Base, Experts, Model
from megalite.config.parallel_schema import DataMode, DataParallel, ExpertParallel, Parallel
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Train
from megalite.plan.model.weights import weights

MODEL = Model(6, 16, 4, 2, None, 24, 32, 8, experts=Experts(8, 2))
CONFIG = Config(model=MODEL, parallel=Parallel(dp_shard=1), batch=Batch(1, 4))


def with_experts(**keys: object) -> Config:
    return replace(CONFIG, model=replace(MODEL, experts=replace(MODEL.experts, **keys)))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (with_experts(active=9), "model.experts.active = 9: must be at most model.experts.count = 8"),
        (with_experts(count=1, active=1), "model.experts.count = 1: "),
        (with_experts(first_dense=6), "model.experts.first_dense = 6: leaves none of the 6 layers with experts"),
        (with_experts(every=7), "model.experts.every = 7: leaves none of the 6 layers with experts"),
        (with_experts(first_dense=4, every=4), "model.experts.every = 4: leaves none of the 6 layers with experts"),
        (with_experts(groups=3), "model.experts.count = 8: must be divisible by model.experts.groups = 3"),
        (with_experts(groups=2, active_groups=3), "model.experts.active_groups = 3: must be at most"),
        (
            with_experts(groups=8, active_groups=1),
            "model.experts.active = 2: must be at most 1, the experts of model.experts.active_groups = 1 groups",
        ),
        (with_experts(shared_gate=True), "model.experts.shared_gate = true: has no meaning without"),
        (with_experts(shared_width=0), "model.experts.shared_width = 0: "),
        (with_experts(correction_rate=-1.0), "model.experts.correction_rate = -1.0: "),
        (with_experts(balance_loss=-0.1), "model.experts.balance_loss = -0.1: "),
        (with_experts(z_loss=2000.0), "model.experts.z_loss = 2000.0: "),
        (with_experts(scale=0.0), "model.experts.scale = 0.0: "),
        (
            replace(CONFIG, model=replace(MODEL, parametrization="mup", base=Base(8, None, 4))),
            'model.parametrization = "mup": cannot be used with model.experts',
        ),
        (
            replace(CONFIG, parallel=Parallel(dp_shard=1, experts=ExpertParallel("worst_case"))),
            'parallel.experts.buffers = "worst_case": has no meaning with parallel.ep = 1',
        ),
        (replace(CONFIG, train=Train(compile=True)), "train.compile = true: cannot be used with model.experts"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_is_refused(config: Config, told: str) -> None:
    (problem,) = validate(config, 1)
    assert str(problem).startswith(told)


@pytest.mark.parametrize(
    ("keys", "mixed"),
    [
        ({}, {1, 2, 3, 4, 5, 6}),
        ({"active": 8}, {1, 2, 3, 4, 5, 6}),
        ({"first_dense": 1}, {2, 3, 4, 5, 6}),
        ({"every": 2}, {2, 4, 6}),
        ({"first_dense": 2, "every": 2}, {4, 6}),
        ({"first_dense": 5}, {6}),
    ],
)
def test_layers_have_experts_as_the_keys_say(keys: dict[str, int], mixed: set[int]) -> None:
    config = with_experts(**keys)
    assert validate(config, 1) == []
    kinds = layer_kinds(config.model)
    assert {number for number, kind in enumerate(kinds, 1) if isinstance(kind.feed_forward, Mixture)} == mixed
    assert {kind.feed_forward.width for kind in kinds} == {24}
    (other,) = {kind.feed_forward for kind in layer_kinds(replace(MODEL, experts=None))}
    assert other == SwiGLU(24)


def test_tensor_parallelism_divides_the_shared_expert() -> None:
    config = replace(with_experts(shared_width=15), parallel=Parallel(dp_shard=1, tp=2, ep=2))
    (problem,) = validate(config, 2)
    assert str(problem).startswith("model.experts.shared_width = 15: must be divisible by parallel.tp = 2")
    assert validate(replace(with_experts(shared_width=16), parallel=config.parallel), 2) == []


@pytest.mark.parametrize(
    ("ep", "dp", "mode", "keys", "dim"),
    [
        (2, 8, "zero3", {}, 0),
        (2, 24, "zero3", {}, 1),  # four experts on twelve ranks, each with two rows of 24
        (2, 32, "zero1", {}, 2),  # on sixteen, which do not divide 24, but the model's width
        (8, 32, "zero2", {}, 1),  # a single one
        (1, 6, "zero3", {}, 1),
        (2, 6, "zero3", {"width": 25}, None),
        (2, 10, "zero3", {}, None),
        (2, 10, "ddp", {}, 0),
        (8, 24, "zero3", {"width": 25}, None),
    ],
)
def test_experts_are_sharded_along_a_dimension_that_ranks_divide(
    ep: int, dp: int, mode: DataMode, keys: dict[str, int], dim: int | None
) -> None:
    config = with_experts(**keys)
    config = replace(config, parallel=Parallel(dp_shard=dp, ep=ep, data=DataParallel(mode)), batch=Batch(1, dp))
    if dim is None:
        (problem,) = validate(config, dp)
        told = f"parallel.ep = {ep}: leaves {dp // ep} ranks to shard {8 // ep} expert"
        assert str(problem).startswith(told)
        return
    assert validate(config, dp) == []
    (gate,) = (weight for name, weight in weights(config.model).items() if name == "layers.0.mlp.experts.gate.weight")
    assert gate.shard_dim(config.parallel.expert_shards, ep) == dim
