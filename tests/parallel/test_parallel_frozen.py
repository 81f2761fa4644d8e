"""Weights that are not trained, by a toy: those of some roles are described so, as the base of adapters would be."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_roles import BASE, ENDS, SOME, frozen
from ranks import Ranks
from torch.utils.flop_counter import FlopCounterMode
from toy_jobs import MODEL, assemble, config_of, load_and_train, make, one_rank, train_and_save

from megalite.checkpoint.store.state import State
from megalite.commands.verify import Trace, compare, random_batch, trace
from megalite.config.layout import Layout
from megalite.config.parallel_schema import DataParallel
from megalite.config.schema import Config, Optim
from megalite.plan.model.size import flops_per_token
from megalite.plan.model.weights import weights
from megalite.plan.parts.roles import Role
from megalite.train.step import gradients


def run(those: frozenset[Role], function: Callable[..., Any], *args: Any) -> Any:
    with frozen(those):
        return function(*args)


def traced(those: frozenset[Role], config: Config, steps: int = 3) -> Trace:
    with frozen(those):
        job = make(config)
        return trace(config, job.mesh, steps)


@pytest.mark.parametrize("those", [BASE, SOME, ENDS], ids=["base", "some", "ends"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_process_trains_the_others_as_it_would_anyway(those: frozenset[Role], optimizer: str) -> None:
    config = replace(config_of(Layout()), optim=Optim(optimizer, lr=0.01))
    with one_rank():
        all_of, found = traced(frozenset(), config), traced(those, config)
    trained = [name for name, weight in weights(MODEL).items() if weight.role not in those]
    grads, expected = dict(found.gradients[0]), dict(all_of.gradients[0])
    assert list(grads) == trained
    for name, part in grads.items():
        torch.testing.assert_close(part.values, expected[name].values, rtol=1e-12, atol=1e-15)
    assert found.norms[0] == pytest.approx(sqrt(sum(float(part.values.square().sum()) for part in grads.values())))
    before, after = dict(found.initial), dict(found.weights)
    assert {name for name, part in after.items() if not part.values.equal(before[name].values)} == set(trained)


def flops(those: frozenset[Role]) -> tuple[int, int]:
    """Floating-point operations of a step's gradients, counted and predicted, attention aside."""
    config = config_of(Layout())
    with one_rank(), frozen(those), FlopCounterMode(display=False) as counted:
        job = make(config)
        gradients(job, random_batch(job, 0))
        return counted.get_total_flops(), flops_per_token(MODEL) * config.batch.global_ * MODEL.sequence_length


@pytest.mark.parametrize("those", [BASE, SOME, ENDS], ids=["base", "some", "ends"])
def test_no_gradients_are_computed_for_them(those: frozenset[Role]) -> None:
    (counted, predicted), (fewer, fewer_predicted) = flops(frozenset()), flops(those)
    assert counted - fewer == predicted - fewer_predicted > 0


def modified(layout: Layout, schedule: str = "1f1b", mode: str = "zero3", tied: bool = False, **changes: Any) -> Config:
    config = config_of(layout, replace(MODEL, tie_embeddings=tied), schedule)
    config = replace(config, parallel=replace(config.parallel, data=DataParallel(mode)))
    train = replace(config.train, recompute=changes.get("recompute", "none"))
    return replace(config, train=train, optim=replace(config.optim, name=changes.get("optimizer", "adamw")))


LAYOUTS = {
    "base, zb_h1": (BASE, modified(Layout(pp=2, dp_shard=2, tp=2), "zb_h1", "zero2")),
    "base, ends of a pipeline train nothing": (BASE, modified(Layout(pp=4, dp_shard=2), optimizer="muon")),
    "base, replicas, recompute": (BASE, modified(Layout(dp_replicate=2, dp_shard=2, cp=2), recompute="full")),
    "some, tp, muon": (SOME, modified(Layout(dp_shard=4, tp=2), mode="zero1", optimizer="muon")),
    "some, zb_h1, recompute": (SOME, modified(Layout(pp=2, cp=2, tp=2), "zb_h1", recompute="selective")),
    "ends, tied, zbv": (ENDS, modified(Layout(pp=2, dp_shard=4), "zbv", "zero2", tied=True)),
    "ends, tied, two copies": (ENDS, modified(Layout(pp=2, tp=2, dp_shard=2), tied=True)),
    "ends, ddp": (ENDS, modified(Layout(dp_shard=4, tp=2), mode="ddp")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_process(name: str, ranks: Ranks) -> None:
    those, config = LAYOUTS[name]
    found = ranks.run(run, those, compare, config, 2, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
    trained = {name for name, weight in weights(config.model).items() if weight.role not in those}
    assert trained.issuperset(found[-1].without_gradient)  # not trained is not without a gradient


@pytest.mark.parametrize(
    ("those", "first", "then"),
    [
        (BASE, Layout(pp=2, dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2, cp=2)),
        (SOME, Layout(dp_shard=4, tp=2), Layout(pp=4, dp_shard=2)),
    ],
)
def test_a_checkpoint_has_them_and_is_resumed_in_another_layout(
    those: frozenset[Role], first: Layout, then: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    with one_rank(), frozen(those):
        losses, expected = train_and_save(config_of(Layout()), tmp_path / "one", 2, 4)
        untouched = {name for name, weight in weights(MODEL).items() if not weight.trained}
        job = make(config_of(Layout()))
        saved = State(job.stages, job.optimizer).tensors()
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == weights(MODEL).keys()
    moments = {name.split(".", 2)[2] for name in saved if name.startswith("optimizer.")}
    assert moments == weights(MODEL).keys() - untouched
    began = ranks.run(run, those, train_and_save, config_of(first), tmp_path / "many", 2)
    resumed = ranks.run(run, those, load_and_train, config_of(then), tmp_path / "many" / "step-00000002", 4)
    assert [*began[0][0], *resumed[0][2]] == pytest.approx(losses, rel=1e-10)
    at_2 = assemble([parts for _, parts in began])
    loaded, at_4 = assemble([parts for _, parts, *_ in resumed]), assemble([parts for *_, parts in resumed])
    torch.testing.assert_close(loaded, at_2, rtol=0, atol=0)
    assert at_4.keys() == expected.keys()
    for name, part in expected.items():
        exact = name in untouched
        torch.testing.assert_close(at_4[name], part.values, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)
