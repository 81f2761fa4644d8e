"""Layers with experts whose choices are not known: fake tensors have no numbers, so a host that waits for one fails."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from memory_cases import APART, EXPERTS, GPT_OSS, SHARED, WORST_CASE, Overrides, configured
from torch._subclasses.fake_tensor import DataDependentOutputException

from megalite.config.schema import Config
from megalite.dry_run import run
from megalite.dry_run.configuration import as_counted
from megalite.parallel import experts


def run_with_choices(overrides: Overrides) -> run.DryRun:
    """A dry run of a step in which a router chooses, and products of experts are one call, as in bf16 on a GPU."""

    def choosing(config: Config) -> Config:
        counted = as_counted(config)
        assert counted.model.experts is not None
        return replace(
            counted, model=replace(counted.model, experts=replace(counted.model.experts, force_balance=False))
        )

    with patch.object(run, "as_counted", choosing), patch.object(experts, "_has_grouped_products", lambda *_: True):
        return run.dry_run(configured({"model.layers": 2, **overrides}), 0)


@pytest.mark.parametrize(
    "overrides",
    [
        EXPERTS,
        {**EXPERTS, **GPT_OSS, "train.recompute": "full"},
        {**APART, **WORST_CASE},
        {**APART, **WORST_CASE, **GPT_OSS, **SHARED, "train.recompute": "selective"},
        {**APART, **WORST_CASE, "train.recompute": "full", "model.experts.balance_loss": 0.01},
    ],
    ids=[
        "one rank",
        "one rank, gpt-oss, full",
        "worst case",
        "worst case, gpt-oss, shared, selective",
        "worst case, full",
    ],
)
def test_no_host_waits(overrides: Overrides) -> None:
    assert run_with_choices(overrides).bytes["activations"] > 0, "a step was taken to its end"


def test_with_exact_buffers_the_host_waits() -> None:
    with pytest.raises(DataDependentOutputException):
        run_with_choices(APART)
