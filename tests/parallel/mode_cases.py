"""What runs on the ranks in the tests of data-parallel modes in bf16."""

import torch

from megalite.commands.verify import random_batch
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.step import train_step


def curve(config: Config, steps: int) -> list[tuple[float, float]] | None:
    """Losses and gradient norms of the first steps."""
    mesh = Mesh.build(config.parallel.layout, torch.device("cpu"), config.parallel.data.sharded)
    if mesh is None:
        return None
    job = build(resolve(config), mesh)
    results = [train_step(job, random_batch(job, step), step).read() for step in range(steps)]
    return [(reading.loss, reading.norm) for reading in results]
