"""What runs are told to take, from those that were measured."""

from dataclasses import replace
from typing import Literal

import pytest
from expanding import Expander

from megalite.config.parallel_schema import DataMode
from megalite.experiment.cell import Cell
from megalite.experiment.cost import Estimator, MeasuredStep, estimate
from megalite.experiment.expand import Expanded
from megalite.plan.model.size import flops_per_token

STARTUP, STEP = 4.0, 0.01  # seconds that a step takes at least


@pytest.fixture
def widths(expanded: Expander) -> Expanded:
    """Of 200 steps each."""
    steps, grid = {"train.steps": 200, "log.interval": 5}, {"model.width": [16, 32, 64], "batch.global": [4, 8]}
    return expanded(set=steps, grid=grid)


def true_step(cell: Cell) -> float:
    """A part that is the same for all, and one that grows with the work."""
    return STEP + flops_per_token(cell.config.model) * cell.step_tokens / cell.gpus / 1e9


def measured(cell: Cell) -> MeasuredStep:
    seconds = STARTUP + (cell.steps - cell.start) * true_step(cell)
    return MeasuredStep.of(cell, cell.step_tokens / cell.gpus / true_step(cell), seconds, cell.start)


def test_the_rest_of_an_experiment_is_told_within_15_percent(widths: Expanded) -> None:
    done = [cell for cell in widths.cells if cell.config.batch.global_ == 4 and cell.config.model.width != 32]
    left = [cell for cell in widths.cells if cell not in done]
    costs = estimate(widths, left, map(measured, done))
    assert not costs.unknown
    for cost in costs.costs:
        truth = STARTUP + 200 * true_step(cost.cell)
        assert cost.seconds == pytest.approx(truth, rel=0.15)
    assert {cost.source for cost in costs.costs} == {"measured with other batches", "measured on other sizes"}


def test_a_run_that_is_like_one_that_is_done_takes_as_long(widths: Expanded) -> None:
    (cost,) = estimate(widths, widths.cells[:1], [measured(widths.cells[0])]).costs
    assert cost.seconds == pytest.approx(STARTUP + 200 * true_step(widths.cells[0]), rel=1e-3)
    assert cost.source == "measured"


def test_steps_that_are_saved_are_not_paid_again(widths: Expanded) -> None:
    cell = widths.cells[0]
    costs = estimate(widths, [cell], [measured(cell)], {cell.id: 150})
    assert costs.costs[0].steps == 50
    assert costs.costs[0].seconds == pytest.approx(STARTUP + 50 * true_step(cell), rel=1e-2)


def test_without_a_run_that_is_done_the_startup_is_that_of_the_file(widths: Expanded) -> None:
    cell = widths.cells[0]
    under_way = replace(measured(cell), startup=None)
    assert Estimator(widths, [under_way]).startup == widths.setup.experiment.launch.startup == 60
    assert Estimator(widths, [under_way, measured(cell)]).startup == pytest.approx(STARTUP, rel=1e-3)


def test_steps_of_one_size_tell_nothing_of_their_least_time(widths: Expanded) -> None:
    small, large = widths.cells[0], widths.cells[-1]
    estimator = Estimator(widths, [measured(small)])
    ratio = measured(large).flops / measured(small).flops
    assert estimator.step(large) == (pytest.approx(true_step(small) * ratio), "measured on other sizes")


def test_the_planner_times_the_mode_that_a_start_chooses(widths: Expanded) -> None:
    """Small models fit a GPU whole, and gather their weights once a step."""
    widths.setup.experiment.launch.cluster = "h100_sxm"
    estimator = Estimator(widths)
    cell = replace(widths.cells[-1], gpus=4)
    parallel, batch = replace(cell.config.parallel, dp_shard=4), replace(cell.config.batch, micro=1)

    def seconds(mode: DataMode | Literal["auto"]) -> float:
        data = replace(parallel.data, mode=mode)
        config = replace(cell.config, parallel=replace(parallel, data=data), batch=batch)
        found = estimator.step(replace(cell, config=config))
        assert found is not None
        assert found[1] == "planner, h100_sxm"
        return found[0]

    assert seconds("auto") == seconds("zero1") < seconds("zero3")
