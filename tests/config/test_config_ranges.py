"""How small and how large numbers may be."""

import pytest

from megalite.config.convert import keys, options
from megalite.config.load import load
from megalite.config.rules.validate import validate


def told(*overrides: str) -> list[str]:
    return [str(problem) for problem in validate(load([], overrides))]


LOSSES = "model.experts.balance_loss", "model.experts.z_loss"
FLOATS = [key for key, hint in keys().items() if float in options(hint) and "[]" not in key]


@pytest.mark.parametrize("key", FLOATS)
def test_numbers_are_such_that_float32_can_hold_them(key: str) -> None:
    """A number that rounds to 0 or to infinity there gives NaN many steps later."""
    others = {"batch.memory": ["batch.micro=auto"], "train.recompute_budget": ["train.recompute=budget"]}.get(key, [])
    for value in ("1e-50", "1e-300", "1e39", "1e300", "-1e-50"):
        problems = [line for line in told(f"{key}={value}", *others) if line.startswith(f"{key} = ")]
        may_be_0 = (
            "adapter.dropout",
            "model.experts.correction_rate",
            "optim.weight_decay",
            "optim.muon.momentum",
            "schedule.floor",
            *LOSSES,
        )
        harmless = key in may_be_0 and value in ("1e-50", "1e-300")  # as 0
        assert bool(problems) != harmless, (value, problems)


def test_the_betas_of_float32_are_below_1() -> None:
    assert told("optim.betas=[0.9999999999, 0.5]")
    assert not told("optim.betas=[0, 0.999999]")
