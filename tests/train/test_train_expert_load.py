"""Tokens of each expert in a step, and the correction of choices that follows from them."""

from dataclasses import replace

import torch
from toy_jobs import make, one_rank

from megalite.commands.verify import random_batch
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Train
from megalite.train.build import Job
from megalite.train.step import evaluate, gradients, train_step, update
from megalite.train.vital_signs import Reading

RATE = 0.25
CONFIG = Config(
    model=Model(
        3, 12, 2, 2, None, 20, 40, 16, init_std=0.5, experts=Experts(6, 2, 9, first_dense=1, correction_rate=RATE)
    ),
    parallel=Parallel(dp_shard=1),
    batch=Batch(1, 4),
    train=Train(3, "fp64"),
)


def corrections(job: Job) -> list[torch.Tensor]:
    return [buffer.to_local().clone() for buffer in job.stages[0].buffers()]


def after_a_step(config: Config) -> tuple[Reading, list[torch.Tensor]]:
    job = make(config)
    batch = random_batch(job, 0)
    gradients(job, batch)  # counts that the step below forgets
    evaluate(job, [batch])
    return train_step(job, batch, 0).read(), corrections(job)


def test_a_step_counts_each_token_once_and_corrects_by_that() -> None:
    with one_rank():
        (reading, found), *others = (
            after_a_step(replace(CONFIG, batch=Batch(micro, 4), train=replace(CONFIG.train, recompute=mode)))
            for micro, mode in ((1, "none"), (2, "full"), (4, "selective"))
        )
    assert all(other.load == reading.load for other, _ in others)
    for layer, correction in enumerate(found):
        load = reading.load[6 * layer : 6 * layer + 6]
        assert sum(load) == 4 * 16 * 2
        assert len(set(load)) > 1
        assert correction.tolist() == [RATE * ((6 * each < 4 * 16 * 2) - (6 * each > 4 * 16 * 2)) for each in load]
    assert len(found) == 2
    assert all(
        torch.equal(mine, correction) for _, other in others for mine, correction in zip(other, found, strict=True)
    )


def test_a_step_that_is_not_taken_corrects_nothing() -> None:
    with one_rank():
        job = make(CONFIG)
        batch = random_batch(job, 0)
        update(job, gradients(job, batch), 0)
        before = corrections(job)
        assert update(job, gradients(job, batch) * torch.nan, 1).bad
        assert all(map(torch.equal, before, corrections(job)))
        update(job, gradients(job, batch), 1)
        assert not all(map(torch.equal, before, corrections(job)))


def test_a_model_without_experts_sends_no_counts() -> None:
    with one_rank():
        job = make(replace(CONFIG, model=replace(CONFIG.model, experts=None)))
        assert train_step(job, random_batch(job, 0), 0).read().load == ()
