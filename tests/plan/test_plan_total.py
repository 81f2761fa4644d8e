"""A walk that counts bytes alone finds as many as one that tells what they are of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.plan.memory.held import on_device
from megalite.plan.memory.peak import memory_of_ranks
from megalite.plan.memory.total import Total, fullest
from megalite.plan.memory.walk import Walk
from megalite.plan.pipeline import micro_batches
from megalite.plan.resolved import resolve
from megalite.schedule.generate import NAMES


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.data.mode=zero3", "train.recompute=selective"],
        ["parallel.data.mode=zero2", "parallel.pp=2", "parallel.pipeline.schedule=zbv", "parallel.dp_replicate=2"],
        ["parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b", "train.recompute=full"],
        ["train.offload_activations=true", "optim.placement=host", "checkpoint.async=true"],
    ],
    ids=lambda keys: keys[0],
)
def test_bytes_are_those_of_the_detailed_walk(keys: list[str]) -> None:
    given = ["batch.global=16", "batch.micro=1", "run.device=cuda", "parallel.pipeline.split=null", *keys]
    config = check(load(["configs/model/tiny_tied.yaml"], given), 4)
    every = memory_of_ranks(config)
    assert fullest(resolve(config), range(len(every))) == max(memory.total for memory in every) > 0


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(NAMES),
    pp=st.integers(1, 3),
    micro=st.integers(1, 9),
    mode=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    replicas=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    reduced=st.sampled_from(["fp32", "bf16"]),
    tied=st.booleans(),
    offload=st.booleans(),
)
def test_actions_that_are_looked_up_do_what_they_did_before(
    schedule: str,
    pp: int,
    micro: int,
    mode: str,
    replicas: int,
    recompute: str,
    reduced: str,
    tied: bool,
    offload: bool,
) -> None:
    world = 4 * pp
    given = {
        "parallel.pp": pp,
        "parallel.pipeline.schedule": schedule,
        "parallel.data.mode": mode,
        "parallel.data.reduce_precision": reduced,
        "parallel.dp_replicate": replicas if mode != "ddp" else 1,
        "train.recompute": recompute,
        "train.offload_activations": offload,
        "train.precision": "bf16",
        "model.tie_embeddings": tied,
        "model.layers": 13 * pp,
        "batch.global": 4 * pp * micro,
        "batch.micro": 1,
        "run.device": "cuda",
    }
    config = check(load(["configs/model/tiny.yaml"], [f"{key}={value}" for key, value in given.items()]), world)
    plan, m = resolve(config), micro_batches(config)
    for rank in range(pp):
        assert Total(plan, m, rank).most_bytes() == on_device(Walk(plan, m, rank).run())
