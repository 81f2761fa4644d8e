"""State that is neither parameter nor an optimizer's, by a toy: features of every layer count how much they were used.

As experts would: each tensor-parallel rank counts those it has, and before a step all add up what their tokens used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from toy_jobs import MODEL, Parts, advance, assemble, config_of, make, one_rank, restorer, save

from megalite.commands.verify import RankPart, compare
from megalite.config.layout import Layout
from megalite.config.schema import Config
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import cut, extra_state, placed
from megalite.plan.parts.roles import Role, RoleKind, Side
from megalite.train.build import Job, build

USES = Role(RoleKind.STATE, Side.FEED_FORWARD)


class Uses(nn.Module):
    """Squares of what the features of a layer were given, summed over all tokens of all steps."""

    def __init__(self, width: int, tp: DeviceMesh) -> None:
        super().__init__()
        self.roles = {"sums": USES}
        self.register_buffer("sums", placed((width,), tp, Shard(0)))
        self.new: Tensor | None = None

    def note(self, up: nn.Module, x: Any) -> None:
        """Note the input of `down`, `[s, b, f/t]`."""
        here = x[0].detach().square().sum((0, 1))
        self.new = here if self.new is None else self.new + here

    def add(self, data: DeviceMesh) -> None:
        assert self.new is not None
        self.sum_over(data)
        sums = self.sums
        assert isinstance(sums, DTensor)
        sums.to_local().add_(self.new)
        self.new = None

    def sum_over(self, data: DeviceMesh) -> None:
        for axis in range(data.ndim):
            dist.all_reduce(self.new, group=data.get_group(axis))


class CountingDecoder(Decoder):
    """A decoder with the toy in every layer."""

    def __init__(self, model: Any, tp: DeviceMesh, *given: Any) -> None:
        super().__init__(model, tp, *given)
        for layer in self.layers.values():
            layer.mlp.uses = Uses(model.ffn, tp)
            layer.mlp.down.register_forward_pre_hook(layer.mlp.uses.note)


@contextmanager
def counting() -> Iterator[None]:
    """Jobs that are built inside have the toy."""

    def built(plan: Any, mesh: Any, *given: Any) -> Job:
        job = build(plan, mesh, *given)
        toys = [each for stage in job.stages.values() for each in stage.modules() if isinstance(each, Uses)]

        def count(*_: object) -> None:
            for toy in toys:
                toy.add(mesh.data)

        job.optimizer.register_step_pre_hook(count)
        return job

    with (
        patch("megalite.train.build.Decoder", CountingDecoder),
        patch("toy_jobs.build", built),
        patch("megalite.commands.verify.build", built),
    ):
        yield


def state(job: Job) -> Parts:
    every = (found for stage in job.stages.values() for found in extra_state(stage))
    return {found.name: RankPart.of(cut(found.value, found.shape)) for found in every}


def saved_at_2(config: Config, folder: Path) -> tuple[Parts, Parts]:
    """The state after two steps, which are saved, and after four."""
    with counting():
        job = make(config)
        advance(job, 0, 2)
        save(job, folder, 2)
        before = state(job)
        advance(job, 2, 4)
        return before, state(job)


def continued(config: Config, folder: Path) -> tuple[Parts, Parts]:
    """Load two steps after others, as a rollback does; the state then, and two steps later."""
    with counting():
        job = make(replace(config, run=replace(config.run, seed=99)))
        advance(job, 0, 1)
        progress = restorer(job, config).newest(folder, print)
        assert progress is not None
        assert progress.step == 2
        loaded = state(job)
        advance(job, 2, 4)
        return loaded, state(job)


def assert_alike(found: list[Parts], expected: Parts) -> None:
    """The parts that ranks hold make up the state of one process, and have counted something."""
    whole = assemble(found)
    assert whole.keys() == expected.keys() == {f"layers.{layer}.mlp.uses.sums" for layer in range(2)}
    for name, part in expected.items():
        assert part.values.min() > 0
        torch.testing.assert_close(whole[name], part.values, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(dp_replicate=2, dp_shard=2, tp=2), Layout(pp=2, cp=2, tp=2)),
        (Layout(pp=4, dp_shard=2), Layout(dp_shard=4, cp=2)),
    ],
)
def test_it_is_that_of_one_process_in_every_layout_and_after_loading(
    first: Layout, then: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    with one_rank():
        two, four = saved_at_2(config_of(Layout()), tmp_path / "one")
        again = continued(config_of(Layout()), tmp_path / "one")
        assert_alike([again[0]], two)
        assert_alike([again[1]], four)
    found = ranks.run(saved_at_2, config_of(first), tmp_path / "many")
    assert_alike([each[0] for each in found], two)
    assert_alike([each[1] for each in found], four)
    found = ranks.run(continued, config_of(then), tmp_path / "many")
    assert_alike([each[0] for each in found], two)
    assert_alike([each[1] for each in found], four)


def verified(config: Config, forgets: bool) -> list[tuple[str, bool, str]]:
    """What `megalite verify` finds; with `forgets`, of ranks that do not add up what they have counted."""
    sum_over = (lambda *_: None) if forgets else Uses.sum_over
    with counting(), patch.object(Uses, "sum_over", sum_over):
        return [(each.quantity, each.passed, each.where) for each in compare(config, 2, 1e-9)]


def test_verify_compares_it(ranks: Ranks) -> None:
    config = config_of(Layout(dp_shard=4, tp=2), replace(MODEL, layers=1))
    assert all(passed for _, passed, _ in ranks.run(verified, config, False)[0])
    failed = [(quantity, where) for quantity, passed, where in ranks.run(verified, config, True)[0] if not passed]
    assert failed == [("weights after 2 steps", "layers.0.mlp.uses.sums")]
