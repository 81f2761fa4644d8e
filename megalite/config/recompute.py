"""Rules of what is recomputed in backward and what is offloaded."""

from collections.abc import Iterator

from megalite.config.errors import Problem
from megalite.config.schema import Train


def recompute_rules(train: Train) -> Iterator[Problem]:
    """The broken rules of `train.recompute…` and `train.offload_activations`."""
    mode, every, budget = train.recompute, train.recompute_every, train.recompute_budget
    if every > 1 and mode not in ("selective", "full"):
        rule = f"has no meaning with train.recompute = {mode}"
        yield Problem("train.recompute_every", rule, "use 1, or train.recompute=selective or full", every)
    if mode == "budget" and budget is None:
        rule = "is needed for train.recompute = budget"
        yield Problem("train.recompute_budget", rule, "give the GiB of activations that a rank may keep", budget)
    if mode != "budget" and budget is not None:
        rule = f"has no meaning with train.recompute = {mode}"
        yield Problem("train.recompute_budget", rule, "use null, or train.recompute=budget", budget)
    if mode == "budget" and train.offload_activations:
        rule = "cannot be used with train.recompute = budget, which fits activations into the device's memory"
        yield Problem("train.offload_activations", rule, "use false, or another train.recompute", True)
    if train.compile and mode in ("selective", "budget"):
        rule = "cannot be used with train.compile, which itself makes cheap results again in backward"
        yield Problem("train.recompute", rule, "use none or full", mode)
    if train.compile and train.offload_activations:
        rule = "cannot be used with train.compile, which decides itself what is saved for backward"
        yield Problem("train.offload_activations", rule, "use false, or train.compile=false", True)
