"""Sizes of the outputs of a model's modules in training, in whatever layout it is trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.commands.verify import micros_of
from megalite.config.parametrization import multipliers
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder, Head, Layer
from megalite.train.build import Job, build
from megalite.train.recompute_costs import plan_for
from megalite.train.step import train_step

MODULES = ("embedding", "attention logits", "attention", "mlp", "residual", "logits")
SKEW = 3  # token number i is as frequent as i^(1/3 − 1)
Sizes = dict[str, float]  # by module: the mean of the absolute values of its output


def sizes_in_training(config: Config, mesh: Mesh, steps: int) -> list[Sizes]:
    """The sizes before the first step and after each of `steps` steps, as means over the layers. Collective.

    All steps are taken on one batch of tokens that depend on `run.seed` alone. Values are those of all ranks: they
    differ between layouts by roundings only.
    """
    job = build(plan_for(config, mesh), mesh)
    batch = micros_of(job, _samples(config))
    found = []
    for step in range(steps + 1):
        with _watched(job) as sums:
            train_step(job, batch, step)
        dist.all_reduce(sums, group=mesh.world)
        totals, counts = sums.cpu().unbind()
        found.append(dict(zip(MODULES, (totals / counts).tolist(), strict=True)))
    return found


def _samples(config: Config) -> Tensor:
    """Random tokens of one global batch, of which few are frequent, as in texts; so there is something to learn."""
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = config.batch.global_, config.model.sequence_length + 1
    ranks = torch.rand(shape, generator=generator, dtype=torch.float64) ** SKEW
    return (ranks * config.model.vocab_size).long()


@contextmanager
def _watched(job: Job) -> Iterator[Tensor]:
    """Yields a tensor `[2, modules]` that grows in forward passes: the sums of absolute values, and their numbers."""
    sums = torch.zeros(2, len(MODULES), dtype=torch.float64, device=job.mesh.device)
    handles = [handle for stage in job.stages.values() for handle in _hooks(stage, job.mesh, partial(_add, sums))]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def _add(sums: Tensor, module: str, output: Tensor, factor: float = 1.0) -> None:
    size = output.detach().abs().sum(dtype=torch.float64) * factor
    sums[0, MODULES.index(module)] += size
    sums[1, MODULES.index(module)] += output.numel()


Add = Callable[..., None]


def _hooks(stage: Decoder, mesh: Mesh, add: Add) -> Iterator[Any]:
    if stage.first:
        assert stage.embed is not None
        yield stage.embed.register_forward_hook(partial(_output, add, "embedding", 1.0))
    # A branch is seen before it is made smaller for the residual stream, as CompleteP's shrinks by design.
    branch = 1.0 if stage.model.norm != "pre" else 1 / multipliers(stage.model).branch
    for layer, kind in zip(stage.layers.values(), stage.kinds, strict=True):
        assert isinstance(layer, Layer)
        heads = kind.attention.heads
        scale = heads.width**-0.5 if heads.scores.scale is None else heads.scores.scale
        yield layer.attention.register_forward_pre_hook(partial(_scores, add, mesh, scale, stage.model.sequence_length))
        yield layer.attention.register_forward_hook(partial(_output, add, "attention", branch))
        yield layer.mlp.register_forward_hook(partial(_output, add, "mlp", branch))
        yield layer.register_forward_hook(partial(_stream, add))
    if stage.head is not None:
        yield stage.head.register_forward_pre_hook(partial(_logits, add))


def _output(add: Add, name: str, factor: float, module: Any, inputs: Any, output: Tensor) -> None:
    add(name, output, factor)


def _stream(add: Add, layer: Layer, inputs: Any, output: tuple[Tensor, Tensor | None]) -> None:
    """Add the sizes of the residual stream, which a layer hands on as two tensors, or as one."""
    x, added = output
    add("residual", x if added is None else x.detach() + added.detach())


@torch.no_grad()
def _logits(add: Add, head: Head, inputs: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
    """Add the logits' sizes. Training computes a loss without whole logits, so they are computed once more."""
    x, tied, _ = inputs
    add("logits", head.forward(x, tied, None))


def _scores(add: Add, mesh: Mesh, scale: float, length: int, module: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Make attention add the scores of all pairs of queries and keys of a sample, of `length`, also hidden ones."""
    *others, attend = inputs

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            keys = _apart(_whole(k.detach(), mesh.cp), length)
            queries = _apart(q.detach(), length).unflatten(2, (k.shape[2], -1))  # s b k g e
            for each in queries.split(max(1, ROWS // len(keys))):
                add("attention logits", torch.einsum("nbkge,mbke->bkgnm", each, keys).float() * scale)
        return attend(q, k, v)

    return *others, watched


def _apart(x: Tensor, length: int) -> Tensor:
    """Samples of `length` beside each other, `[s, b, …]`, where they lie one behind the other, `[b·s, 1, …]`."""
    return x.squeeze(1).unflatten(0, (-1, length)).movedim(0, 1) if len(x) > length else x


ROWS = 1 << 16  # pairs of positions at a time


def _whole(k: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The keys of all positions, in any order."""
    if group is None:
        return k
    parts = [torch.empty_like(k, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, k.contiguous(), group=group)
    return torch.cat(parts)
