"""Losses of tokens further ahead, from a step to the metrics."""

from dataclasses import replace
from math import log

import pytest
from toy_jobs import MODEL, config_of, make, one_rank

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts, MultiToken
from megalite.plan.batches import GlobalBatch
from megalite.train.guard import Judged
from megalite.train.metrics import Meter
from megalite.train.step import evaluate, train_step
from megalite.train.vital_signs import Reading


def test_a_step_tells_its_own_losses_beside_the_load_of_experts() -> None:
    """Several steps of nearly the same weights, with evaluations between them."""
    config = config_of(Layout(), replace(MODEL, mtp=MultiToken(2), experts=Experts(4, 2, 8)))
    config = replace(config, optim=replace(config.optim, lr=1e-9))
    with one_rank():
        job = make(config)
        batch, readings = random_batch(job, 0), []
        for step in range(3):
            readings.append(train_step(job, batch, step).read())
            evaluate(job, [batch])
    first, *others = readings
    assert first.further == pytest.approx([log(32)] * 2, rel=0.1)
    for other in others:
        assert other.further == pytest.approx(first.further, rel=1e-6)
    assert len(first.load) == 4 * 4  # experts of all layers
    assert sum(first.load) == 2 * 4 * 8 * 8  # choices of 8 samples of 8 tokens in 4 layers


def test_the_metric_is_the_mean_of_good_steps_with_such_tokens() -> None:
    with one_rank():
        meter = Meter(make(config_of(Layout(), replace(MODEL, mtp=MultiToken(3)))))
        for step, further in enumerate([(2.0, 3.0, 0.0), (9.0, 9.0, 9.0), (4.0, 0.0, 0.0)], start=1):
            reading = Reading(1.0, 1.0, (), further=further)
            meter.add(Judged(step, GlobalBatch(0, 8), reading, "bad" if step == 2 else "good", ""))
        meter.note(3)
        record = meter.read(3)
    assert {key: value for key, value in record.items() if key.startswith("mtp_loss")} == {
        "mtp_loss/1": 3.0,
        "mtp_loss/2": 3.0,
    }
