"""Rules of recompute and offload."""

from dataclasses import replace

import pytest

from megalite.config.rules.validate import validate
from megalite.config.schema import Config, Train

GOOD = [
    Train(),
    Train(recompute="selective", recompute_every=2),
    Train(recompute="full", recompute_every=3, compile=True),
    Train(recompute="full", offload_activations=True),
    Train(recompute="budget", recompute_budget=0.5),
]
BAD = {
    "train.recompute_every = 0": Train(recompute="full", recompute_every=0),
    "train.recompute_every = 2: has no meaning with train.recompute = none": Train(recompute_every=2),
    "train.recompute_every = 3: has no meaning with train.recompute = budget": Train(
        recompute="budget", recompute_budget=1.0, recompute_every=3
    ),
    "train.recompute_budget = null: is needed": Train(recompute="budget"),
    "train.recompute_budget = 0: must be at least 1e-06: these are GiB": Train(recompute="budget", recompute_budget=0),
    "train.recompute_budget = 1e+308: must be at most 1,000,000: these are GiB": Train(
        recompute="budget", recompute_budget=1e308
    ),
    "train.recompute_budget = 2.0: has no meaning with train.recompute = full": Train(
        recompute="full", recompute_budget=2.0
    ),
    "train.offload_activations = true: cannot be used with train.recompute = budget": Train(
        recompute="budget", recompute_budget=1.0, offload_activations=True
    ),
    'train.recompute = "selective": cannot be used with train.compile': Train(recompute="selective", compile=True),
    'train.recompute = "budget": cannot be used with train.compile': Train(
        recompute="budget", recompute_budget=1.0, compile=True
    ),
    "train.offload_activations = true: cannot be used with train.compile": Train(
        offload_activations=True, compile=True
    ),
}


@pytest.mark.parametrize("train", GOOD, ids=str)
def test_what_goes_together_is_accepted(train: Train) -> None:
    assert validate(replace(Config(), train=train), 1) == []


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_is_refused_by_name(message: str) -> None:
    problems = validate(replace(Config(), train=BAD[message]), 1)
    assert [str(problem) for problem in problems if str(problem).startswith(message)] == list(map(str, problems))
    assert len(problems) == 1
    assert problems[0].fix or "must be" in problems[0].rule
