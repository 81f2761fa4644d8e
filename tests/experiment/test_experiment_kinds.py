"""Ladders with their trunks, systems, and successive halving, as they are expanded."""

from typing import Any

import pytest
from expanding import Expander

from megalite.base.errors import InputError
from megalite.experiment.cell import Counts
from megalite.experiment.schema import Launch

RUNGS = {
    "a": {"model": {"width": 16}},
    "b": {"model": {"width": 32, "heads": 4, "kv_heads": 4}, "batch": {"micro": 2}, "gpus": 2},
}
DOUBLINGS = [3200, 6400, 12800, 25600]  # tokens; a step has 32


def ladder(expanded: Expander, **sections: Any) -> Any:
    about = {"kind": "ladder", **sections.pop("experiment", {})}
    return expanded(experiment=about, rungs=sections.pop("rungs", RUNGS), **sections)


def test_budgets_of_every_kind(expanded: Expander) -> None:
    by_tokens = ladder(expanded, tokens=DOUBLINGS)
    assert [cell.steps for cell in by_tokens.cells] == [100, 200, 400, 800] * 2
    assert [cell.gpus for cell in by_tokens.cells] == [1] * 4 + [2] * 4
    by_parameters = ladder(expanded, tokens_per_parameter=[2])
    for cell in by_parameters.cells:
        assert cell.tokens == pytest.approx(2 * Counts.of(cell.config.model).with_head, abs=16)
    total = ladder(expanded, tokens_per_parameter=[2], parameters={"fit": "total"})
    assert all(more.tokens > less.tokens for more, less in zip(total.cells, by_parameters.cells, strict=True))
    by_flops = ladder(expanded, flops=[1e9])
    for cell in by_flops.cells:
        assert 6 * Counts.of(cell.config.model).with_head * cell.tokens == pytest.approx(1e9, rel=0.01)
    assert by_flops.cells[0].tokens > by_flops.cells[1].tokens


def test_four_doublings_share_a_trunk(expanded: Expander) -> None:
    found = ladder(expanded, tokens=DOUBLINGS, trunk={"decay": 0.2}, experiment={"seeds": [0, 1]})
    assert len(found.cells) == 16
    whole = ladder(
        expanded, tokens=DOUBLINGS, set={"schedule.name": "wsd"}, derive={"schedule.decay": "round(0.2 * steps)"}
    )
    for trunk in (cell for cell in found.cells if cell.config.checkpoint.at):
        assert (trunk.steps, trunk.config.checkpoint.at, trunk.config.schedule.decay) == (800, [80, 160, 320], 160)
        branches = [cell for cell in found.cells if cell.parent == trunk.id]
        assert [(cell.steps, cell.start) for cell in branches] == [(100, 80), (200, 160), (400, 320)]
        assert {(cell.rung, cell.seed) for cell in branches} == {(trunk.rung, trunk.seed)}
    fewer = 1 - sum(cell.steps - cell.start for cell in found.cells) / sum(cell.steps for cell in found.cells)
    assert fewer == pytest.approx(0.3733, abs=1e-4)
    assert {cell.id for cell in whole.cells} < {cell.id for cell in found.cells}  # a branch is the run from the start


def test_budgets_that_cannot_share_a_trunk_are_told(expanded: Expander) -> None:
    with pytest.raises(InputError, match=r"trunk: is shared by no two budgets, since batch\.global differ"):
        ladder(expanded, tokens=[3200, 6400], trunk={}, derive={"batch.global": "pow2(D / 800)"})


def test_a_budget_of_a_step_or_two_is_refused(expanded: Expander) -> None:
    with pytest.raises(InputError, match=r"tokens = 45: takes 1\.41 steps, and 1 are off by more than 5 %"):
        ladder(expanded, tokens=[45])


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, "tokens_per_parameter: exactly one of"),
        ({"tokens": [1e3], "flops": [1e9]}, "exactly one of"),
        ({"tokens": [1e3, -1]}, r"tokens = \[1000\.0, -1\.0\]: must be a list"),
        ({"tokens": [1e3], "rungs": {}}, "rungs: are needed"),
        (
            {"tokens": [1e3], "rungs": {"a": {"model": {"widht": 3}}}},
            r"rungs\.a\.model\.widht: is no key .* model\.width",
        ),
        ({"tokens": [1e3], "rungs": {"a b": {}}}, r"rungs\.a b: must be named by letters"),
        ({"tokens": [1e3], "rungs": {"a": {"gpus": 0}}}, r"rungs\.a\.gpus = 0"),
        ({"tokens": [1e3], "rungs": {"a": 3}}, r"rungs\.a = 3: must be a section"),
        ({"tokens": [1e3], "trunk": {"decay": 1}}, r"trunk\.decay = 1"),
        ({"tokens": [1e3], "holdout": {"rungs": ["z"]}}, r"holdout\.rungs: names 'z'"),
        ({"tokens": [1e3], "holdout": {"rungs": 3}}, r"holdout\.rungs = 3: must be a list"),
        ({"tokens": [1e3], "holdout": {"rungs": [["a"]]}}, r"holdout\.rungs\[0\] = \[\"a\"\]: must be text"),
        ({"tokens": [1e3], "measure": {"steps": 3}}, "measure: is not read by an experiment of the kind ladder"),
    ],
)
def test_a_ladder_that_is_wrong_is_told(sections: dict[str, Any], told: str, expanded: Expander) -> None:
    with pytest.raises(InputError, match=told):
        ladder(expanded, **sections)


def systems(expanded: Expander, **sections: Any) -> Any:
    return expanded(experiment={"kind": "systems"}, measure={"warmup": 2, "steps": 5, "repeats": 2}, **sections)


def test_weak_scaling_keeps_the_sequences_of_a_data_parallel_rank(expanded: Expander) -> None:
    """Not those of a rank: tensor parallelism makes no more sequences."""
    layouts = [{"parallel.tp": 1}, {"parallel.tp": 2}]
    found = systems(
        expanded, gpus=[2, 4, 8], scaling="weak", layouts=layouts, base={"batch": {"micro": 1, "global": 8}}
    )
    seen = {(c.gpus, c.config.parallel.tp, c.config.parallel.dp_shard, c.config.batch.global_) for c in found.cells}
    assert seen == {(2, 1, 2, 8), (4, 1, 4, 16), (8, 1, 8, 32), (2, 2, 1, 8), (4, 2, 2, 16), (8, 2, 4, 32)}
    assert [cell.seed for cell in found.cells[:2]] == [0, 1]
    assert {(cell.steps, cell.config.log.interval, cell.config.eval.steps) for cell in found.cells} == {(7, 1, 0)}
    assert len({cell.id for cell in found.cells}) == len(found.cells) == 12
    assert found.axes == ("parallel.tp",)


def test_strong_scaling_keeps_the_global_batch(expanded: Expander) -> None:
    found = systems(expanded, gpus=[1, 2, 4], scaling="strong", base={"batch": {"micro": 1, "global": 8}})
    assert {cell.config.batch.global_ for cell in found.cells} == {8}
    assert {cell.config.parallel.dp_shard for cell in found.cells} == {1, 2, 4}


def test_layouts_by_grid(expanded: Expander) -> None:
    layouts = {"grid": {"parallel.tp": [1, 2], "parallel.data.mode": ["ddp", "zero3"]}}
    found = systems(expanded, gpus=[2], layouts=layouts, base={"batch": {"micro": 1}})
    assert len({cell.id for cell in found.cells}) == 8
    assert found.axes == ("parallel.tp", "parallel.data.mode")


def test_layouts_of_the_planner(expanded: Expander) -> None:
    base = {
        "model": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1024},
        "batch": {"micro": 1, "global": 16},
    }
    sections: dict[str, Any] = {"layouts": {"plan": 2}, "launch": {"cluster": "h100_sxm"}, "base": base}
    found = systems(expanded, gpus=[8, 16], scaling="strong", **sections)
    assert len({tuple(cell.axes.items()) for cell in found.cells if cell.gpus == 8}) == 2
    weak = systems(expanded, gpus=[8, 16], scaling="weak", **sections)
    layouts = [
        {(c.config.parallel.pp, c.config.parallel.tp, c.config.parallel.cp) for c in weak.cells if c.gpus == gpus}
        for gpus in (8, 16)
    ]
    assert layouts[0] == layouts[1]
    with pytest.raises(InputError, match=r"layouts\.plan: needs to know the cluster"):
        systems(expanded, gpus=[8], layouts={"plan": 2})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, "gpus = null: must be a list"),
        ({"gpus": [2, 2]}, r"gpus = \[2, 2\]"),
        ({"gpus": [3], "layouts": [{"parallel.tp": 2}]}, "parallel"),
        ({"gpus": [2], "layouts": {"best": 3}}, "layouts: is no way to give layouts"),
        ({"gpus": [2], "layouts": [{"parallel.tpp": 2}]}, r"layouts\[0\]\.parallel\.tpp: is no key"),
        ({"gpus": [2], "launch": {"gpus": 4}}, r"launch\.gpus = 4: is not read by systems"),
        ({"gpus": [1], "experiment": {"seeds": [3]}}, r"experiment\.seeds"),
    ],
)
def test_systems_that_are_wrong_are_told(sections: dict[str, Any], told: str, expanded: Expander) -> None:
    about = {"kind": "systems", **sections.pop("experiment", {})}
    with pytest.raises(InputError, match=told):
        expanded(experiment=about, measure={}, **sections)


def test_halving_knows_the_first_round_and_how_many_follow(expanded: Expander) -> None:
    halving = {"steps": [2, 6, 18], "factor": 3}
    found = expanded(grid={"optim.lr": {"log2": [-10, -2]}}, halving=halving)
    assert [cell.steps for cell in found.cells] == [2] * 9
    assert found.later == 4


def test_every_default_of_a_launch_is_allowed() -> None:
    assert Launch().parallel == 1
