"""An evaluation is the mean of the loss over all tokens of all its batches."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from toy_jobs import config_of, make, one_rank

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Batch
from megalite.train.inputs import inputs
from megalite.train.step import evaluate


def test_an_evaluation_is_the_mean_over_the_tokens_of_several_batches() -> None:
    with one_rank():
        job = make(replace(config_of(Layout()), batch=Batch(2, 6)))
        batches = [random_batch(job, step) for step in range(3)]
        losses = []
        for batch in batches:
            step = inputs(job, batch)
            assert len(step.tokens) == 3  # micro-batches
            for tokens, positions, targets in zip(step.tokens, step.positions, step.targets, strict=True):
                with torch.no_grad():
                    logits = job.stages[0](tokens, positions)
                losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
        means = [evaluate(job, [batch]) for batch in batches]
        mean = evaluate(job, batches)
    expected = torch.stack(losses).view(3, -1).mean(1)
    assert means == pytest.approx(expected.tolist(), rel=1e-12)
    assert len({round(each, 6) for each in means}) == 3  # a mean that forgot or weighed a batch would differ
    assert mean == pytest.approx(expected.mean().item(), rel=1e-12)
