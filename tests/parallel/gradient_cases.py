"""What runs on the ranks in the tests of the global norm and of clipping."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build
from megalite.train.step import gradients
from megalite.train.vital_signs import take_signs
from megalite_kernels.grad_norm import clip_coefficient

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Clipped:
    """Gradients of one rank's stage, clipped."""

    norm: float  # before
    expected_norm: float  # of the gradients of one process, by torch.linalg
    apart: float  # largest difference from what torch's clip_grad_norm_ leaves on one process
    scale: float  # largest ratio of an element after to before
    misplaced: list[str]  # parameters whose gradient is not placed as they are


def clipped(config: Config, limit: float) -> Clipped | None:
    """Clip the gradients of one batch to `limit` in the configured layout, and compare with one process."""
    told = [reference(config, limit)]
    dist.broadcast_object_list(told, src=0)
    mesh = Mesh.build(config.parallel.layout, CPU)
    if mesh is None:
        return None
    expected_norm, expected = told[0]
    job = build(resolve(config), mesh)
    gradients(job, random_batch(job, 0))
    before = whole(job)
    norm = take_signs(mesh, *job.gradients.counted_norms(), None, ()).norm
    coefficient = clip_coefficient(norm, limit)
    for _, param in job.named_parameters():
        param.grad.mul_(coefficient)
    after = whole(job)
    return Clipped(
        norm.item(),
        expected_norm,
        max((after[name] - expected[name]).abs().max().item() for name in after),
        max((after[name] / before[name]).nan_to_num(0.0).max().item() for name in after),
        [name for name, param in job.named_parameters() if param.grad.placements != param.placements],
    )


def reference(config: Config, limit: float) -> tuple[float, dict[str, Tensor]]:
    """On rank 0: the norm of all gradients, and the gradients that torch has clipped."""
    mesh = Mesh.build(Layout(), CPU)
    if mesh is None:
        return 0.0, {}
    job = build(resolve(replace(config, parallel=replace(Parallel(), dp_shard=1))), mesh)
    gradients(job, random_batch(job, 0))
    plain = {}
    for name, grad in whole(job).items():
        plain[name] = torch.zeros_like(grad, requires_grad=True)
        plain[name].grad = grad
    norm = torch.linalg.vector_norm(torch.cat([tensor.grad.flatten() for tensor in plain.values()]))
    torch.nn.utils.clip_grad_norm_(plain.values(), limit)
    return norm.item(), {name: tensor.grad for name, tensor in plain.items()}


def whole(job: Job) -> dict[str, Tensor]:
    """The gradients of what is trained of this rank's stage, of their global shapes."""
    found = {}
    for name, param in job.named_parameters():
        if param.requires_grad:
            assert isinstance(param.grad, DTensor)
            found[name] = param.grad.full_tensor().clone()
    return found
