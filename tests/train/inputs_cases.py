"""What runs on the ranks in the tests of a step's inputs."""

from dataclasses import replace

import torch
import torch.distributed as dist
from toy_jobs import MODEL, config_of

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.parallel_schema import Context
from megalite.config.schema import Config, Data
from megalite.distributed.mesh import Mesh
from megalite.parallel.sequence import Method, unsplit
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.inputs import inputs
from megalite.train.step import evaluate

CPU = torch.device("cpu")
DOCUMENTS = Data(mask_documents=True, reset_positions=True)


def configuration(layout: Layout, method: Method) -> Config:
    config = config_of(layout, replace(MODEL, heads=8, kv_heads=4, sequence_length=32))
    return replace(config, parallel=replace(config.parallel, context=Context(method)), data=DOCUMENTS)


def tokens_are_in_order(method: Method) -> bool:
    """Whether the tokens and targets that the ranks are given are, put together, those of the batch."""
    mesh = Mesh.build(Layout(cp=8), CPU)
    assert mesh is not None
    job = build(resolve(configuration(mesh.layout, method)), mesh)
    batch = random_batch(job, 0)
    step = inputs(job, batch)
    found = []
    for given in (torch.stack(list(step.tokens)), torch.stack(list(step.targets))):  # m s b
        parts = [torch.empty_like(given) for _ in range(8)]
        dist.all_gather(parts, given, group=mesh.cp)
        found.append(unsplit([part.transpose(0, 1) for part in parts], method).permute(1, 2, 0))
    return torch.equal(found[0], batch.tokens[..., :-1]) and torch.equal(found[1], batch.tokens[..., 1:])


def validation_losses(layout: Layout, method: Method) -> list[float]:
    """Of a new model on one batch, on one process and in `layout`, as far as this rank is in them."""
    found = []
    for where in (Layout(), layout):
        mesh = Mesh.build(where, CPU)
        if mesh is not None:
            config = configuration(where, method)
            job = build(resolve(replace(config, data=replace(DOCUMENTS, reset_positions=False))), mesh)
            found.append(evaluate(job, [random_batch(job, 0)]))
    return found
