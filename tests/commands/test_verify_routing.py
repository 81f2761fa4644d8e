"""`megalite verify` compares the experts of tokens before numbers."""

import io
from dataclasses import replace

import pytest
import verify_faults as faults
from ranks import Ranks
from rich.console import Console

from megalite.commands.verify import compare, show
from megalite.commands.verify_routing import LayerRouting, routing_text
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Optim, Train

MODEL = Model(5, 16, 4, 2, None, 16, 32, 8, experts=Experts(6, 3, 5, first_dense=1, balance_loss=0.1))


def configuration(schedule: str = "1f1b", recompute: str = "none", **degrees: int) -> Config:
    """All layers but the first have experts; a data-parallel rank has three micro-batches of two sequences."""
    parallel = Parallel(**{"dp_shard": 1, "pipeline": Pipeline(schedule), **degrees})
    config = Config(
        model=MODEL,
        parallel=parallel,
        batch=Batch(2, 6 * parallel.layout.dp),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(lr=0.01),
    )
    assert validate(config, parallel.layout.world_size) == []
    return config


EVERY_AXIS = [
    configuration("zbv", "full", pp=2, cp=2, tp=2, ep=2),
    configuration("1f1b", "full", pp=2, dp_shard=2, tp=2, ep=2),
    configuration("gpipe", "selective", dp_replicate=2, cp=4),
]
TENSOR = configuration(recompute="full", tp=2, ep=2)


@pytest.mark.parametrize("config", EVERY_AXIS, ids=lambda config: str(config.parallel.layout))
def test_tokens_of_all_axes_are_compared_with_themselves(config: Config, ranks: Ranks) -> None:
    found = ranks.run(compare, config, 3, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
    tokens = 3 * 8 * config.batch.global_
    assert found[0].first == f"Routing: equal for all {tokens:,} tokens of 4 layers with experts."


@pytest.mark.parametrize("config", [TENSOR, *EVERY_AXIS], ids=lambda config: str(config.parallel.layout))
def test_every_token_with_another_expert_is_counted(config: Config, ranks: Ranks) -> None:
    """One of each of a rank's three micro-batches, in its first layer with experts. In later layers, others follow."""
    first = ranks.run(faults.compare_with, faults.one_choice_that_differs, config, 1)[0][0]
    assert (first.quantity, first.where) == ("routing", "layer 1, step 0")
    tokens = 8 * config.batch.global_
    assert first.value == 3 / tokens
    assert first.first.startswith(f"Routing differs for 3 of {tokens} tokens in layer 1, step 0.\n")
    assert "Numbers after it are expected to differ." in first.first


@pytest.mark.parametrize("fault", [faults.ties_to_the_higher_number, faults.experts_of_the_token_before])
def test_another_routing_is_told_before_numbers(fault: faults.Fault, ranks: Ranks) -> None:
    found = ranks.run(faults.compare_with, fault, TENSOR)[0]
    assert {difference.quantity for difference in found if difference.passed} == {"initial weights"}
    console = Console(file=io.StringIO(), width=100)
    show(TENSOR, found, console)
    assert console.file.getvalue().startswith("Routing differs for ")


def test_the_order_of_experts_is_no_difference(ranks: Ranks) -> None:
    found = ranks.run(faults.compare_with, faults.experts_in_another_order, TENSOR)[0]
    assert [difference for difference in found if not difference.passed] == []


def test_passes_that_are_run_again_are_no_choices(ranks: Ranks) -> None:
    found = ranks.run(faults.compare_with, faults.recompute_that_chooses_again, TENSOR, 1)[0]
    passed = {difference.quantity for difference in found if difference.passed}
    assert passed == {"routing", "loss", "initial weights"}


def test_only_the_first_step_with_differences_is_told() -> None:
    compared = [
        LayerRouting(step, layer, differing, 64)
        for step, layer, differing in [(0, 1, 0), (0, 3, 0), (1, 1, 0), (1, 3, 2), (2, 1, 9), (2, 3, 9)]
    ]
    told = routing_text(compared).splitlines()
    assert told[0] == "Routing differs for 2 of 64 tokens in layer 3, step 1."
    assert told[1].startswith("The cause is in the router")


def test_a_model_without_experts_has_no_routing(ranks: Ranks) -> None:
    dense = replace(TENSOR, parallel=Parallel(dp_shard=1, tp=2), model=replace(MODEL, experts=None))
    found = ranks.run(compare, dense, 1, 1e-10)[0]
    assert "routing" not in {difference.quantity for difference in found}
