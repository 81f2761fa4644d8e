"""A walk that counts bytes alone finds as many as one that tells what they are of."""

import pytest

from megalite.config.load import load
from megalite.config.validate import check
from megalite.plan.memory import memory_of_ranks
from megalite.plan.resolved import resolve
from megalite.plan.total import fullest


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.data.mode=zero3", "train.recompute=selective"],
        ["parallel.data.mode=zero2", "parallel.pp=2", "parallel.pipeline.schedule=zbv", "parallel.dp_replicate=2"],
        ["parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b", "train.recompute=full"],
        ["train.offload_activations=true", "optim.offload=true", "checkpoint.async=true"],
    ],
    ids=lambda keys: keys[0],
)
def test_bytes_are_those_of_the_detailed_walk(keys: list[str]) -> None:
    given = ["batch.global=16", "batch.micro=1", "run.device=cuda", "parallel.pipeline.split=null", *keys]
    config = check(load(["configs/model/tiny_tied.yaml"], given), 4)
    every = memory_of_ranks(config)
    assert fullest(resolve(config), range(len(every))) == max(memory.total for memory in every) > 0
