"""Routing in `megalite verify`: the experts of every token in a layout and in one process, compared as sets.

One choice that differs changes all numbers after it, by far more than rounding does. So routing is compared first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.errors import counted
from megalite.distributed.mesh import Mesh
from megalite.model.experts import Experts
from megalite.model.router import Router
from megalite.parallel.pipeline import Entry
from megalite.parallel.sequence import rows, split
from megalite.schedule.actions import Action, Kind
from megalite.train.build import Job


@dataclass(frozen=True)
class RankChoices:
    """Experts `[tokens, K]` of one rank's tokens in one step, and the numbers `[tokens]` of these in the batch."""

    numbers: Tensor
    experts: Tensor


Choices = dict[int, RankChoices]  # by number of the layer, for those with experts


@dataclass(frozen=True)
class LayerRouting:
    """Number of tokens of a step that have other experts in a layer than in one process."""

    step: int
    layer: int
    differing: int
    tokens: int


class Recorder:
    """Notes which experts the routers of a job choose. Passes that full recompute runs again are left out."""

    def __init__(self, job: Job) -> None:
        self._job, self._made = job, dict[int, dict[int, Tensor]]()  # by layer and micro-batch
        for stage in job.stages.values():
            for number, layer in stage.layers.items():
                if isinstance(layer.mlp, Experts):
                    layer.mlp.router.register_forward_hook(partial(self._note, int(number)))

    def _note(self, layer: int, router: Router, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        entry, _ = self._job.activity.now
        if isinstance(entry, Entry) and isinstance(entry.item, Action) and entry.item.kind is Kind.F:
            self._made.setdefault(layer, {})[entry.item.micro] = output[1]

    def take(self) -> Choices:
        """Return what was chosen since the last call, which must be one step."""
        made, self._made = self._made, {}
        return {layer: self._whole([each for _, each in sorted(micros.items())]) for layer, micros in made.items()}

    def _whole(self, micros: list[Tensor]) -> RankChoices:
        numbers = torch.stack(
            [self._numbers(number, len(micros), *each.shape[:2]) for number, each in enumerate(micros)]
        )
        return RankChoices(numbers.flatten(), torch.stack(micros).flatten(0, 2))

    def _numbers(self, micro: int, micros: int, positions: int, samples: int) -> Tensor:
        """The numbers in the batch of this rank's tokens of a micro-batch, `[positions, samples]` as they are run."""
        config, layout, at = self._job.config, self._job.mesh.layout, self._job.mesh.coordinates
        length = positions * layout.cp * layout.tp  # all samples' where they are joined
        held = rows(config.parallel.context.method, layout.cp, at["cp"], length)
        mine = split(torch.arange(length), held).chunk(layout.tp)[at["tp"]]
        first = (self._job.mesh.dp_rank * micros + micro) * samples
        return mine[:, None] + length * torch.arange(first, first + samples)


def compare_choices(reference: Sequence[Choices], found: Sequence[Choices], mesh: Mesh) -> list[LayerRouting]:
    """Compare the choices of all ranks with those of one process, for every step, from the first layer to the last.

    Collective over the mesh.
    """
    here: Counter[tuple[int, int]] = Counter()
    for step, layers in enumerate(found):
        for layer, choices in layers.items():
            whole = reference[step][layer]
            by_number = torch.empty_like(whole.experts)
            by_number[whole.numbers] = whole.experts
            expected = by_number[choices.numbers]
            here[step, layer] = int((_as_sets(expected) == _as_sets(choices.experts)).all(-1).sum())
    everywhere = [here] * mesh.layout.world_size
    dist.all_gather_object(everywhere, here, group=mesh.world)
    equal = sum(everywhere, Counter())
    compared = []
    for step, layers in enumerate(reference):
        for layer, choices in sorted(layers.items()):
            tokens = choices.experts[..., 0].numel()
            compared.append(LayerRouting(step, layer, tokens - equal[step, layer], tokens))
    return compared


def _as_sets(experts: Tensor) -> Tensor:
    return experts.sort(dim=-1).values


def routing_text(compared: Sequence[LayerRouting]) -> str:
    """Text that is shown before numbers are compared: the first step and the layers with another routing, if any."""
    differing = [each for each in compared if each.differing]
    if not differing:
        layers = len({each.layer for each in compared})
        tokens = sum(each.tokens for each in compared) // layers
        return f"Routing: equal for all {tokens:,} tokens of {counted(layers, 'layer')} with experts."
    first = [each for each in differing if each.step == differing[0].step]
    lines = [
        f"Routing differs for {each.differing:,} of {each.tokens:,} tokens in layer {each.layer}, step {each.step}."
        for each in first
    ]
    lines.append(
        "The cause is in the router of the first of these layers or before it. Numbers after it are expected to differ."
    )
    return "\n".join(lines)
