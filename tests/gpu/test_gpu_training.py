"""What only a CUDA device can show; `make gpu` runs it."""

import pytest
import torch

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Optim, Run, Train
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.step import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = {"dense": None, "experts": Experts(32, 4, 128, balance_loss=0.01, z_loss=0.001)}  # of which some get no token
of_both = pytest.mark.parametrize("kind", KINDS)


def job_on(device: str, precision: str, kind: str, **train: bool):
    config = Config(
        run=Run(device=device),
        model=Model(2, 256, 4, 2, None, 512, 512, 128, experts=KINDS[kind]),
        parallel=Parallel(dp_shard=1),
        batch=Batch(micro=2, global_=4),
        train=Train(steps=20, precision=precision, **train),
        optim=Optim(lr=1e-3),
    )
    mesh = Mesh.build(Layout(), torch.device(device))
    assert mesh is not None
    return build(resolve(config), mesh)


@of_both
def test_initial_weights_are_bit_identical_to_those_made_on_a_cpu(kind: str, one_rank) -> None:
    on_cpu, on_gpu = (dict(job_on(device, "fp32", kind).named_parameters()) for device in ("cpu", "cuda"))
    for name, param in on_cpu.items():
        assert torch.equal(param.to_local(), on_gpu[name].to_local().cpu()), name


@of_both
def test_float64_training_equals_the_cpu(kind: str, one_rank) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        job = job_on(device, "fp64", kind)
        losses.append([train_step(job, random_batch(job, 0), step).read().loss for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


@of_both
def test_bf16_training_learns_a_batch_by_heart(kind: str, one_rank) -> None:
    job = job_on("cuda", "bf16", kind)
    losses = [train_step(job, random_batch(job, 0), step).read().loss for step in range(20)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("precision", "compiled", "tolerance"), [("fp64", False, 1e-9), ("bf16", False, 5e-3), ("bf16", True, 5e-3)]
)
def test_micro_batches_by_graphs_train_as_those_without(
    precision: str, compiled: bool, tolerance: float, one_rank
) -> None:
    """Tokens, and how many are trained, change; so do weights, as by a checkpoint that is loaded.

    In bf16, attention's backward adds up in an order that varies.
    """
    found = []
    for graphs in (False, True):
        job = job_on("cuda", precision, "dense", compile=compiled, cuda_graph=graphs)
        readings = [train_step(job, random_batch(job, step, masked=True), step).read() for step in range(6)]
        with torch.no_grad():
            for _, param in job.named_parameters():
                param.to_local().mul_(0.5)
        readings += [train_step(job, random_batch(job, step, masked=True), step).read() for step in range(6, 9)]
        found.append([(reading.loss, reading.norm) for reading in readings])
    for (loss, norm), (of_graphs, norm_of_graphs) in zip(*found, strict=True):
        assert of_graphs == pytest.approx(loss, rel=tolerance)
        assert norm_of_graphs == pytest.approx(norm, rel=10 * tolerance)
