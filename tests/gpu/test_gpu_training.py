"""What only a CUDA device can show; `make gpu` runs it."""

import pytest
import torch

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Batch, Config, Model, Optim, Parallel, Run, Train
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.step import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def job_on(device: str, precision: str):
    config = Config(
        run=Run(device=device),
        model=Model(layers=2, width=256, heads=4, kv_heads=2, ffn=512, vocab_size=512, sequence_length=128),
        parallel=Parallel(dp_shard=1),
        batch=Batch(micro=2, global_=4),
        train=Train(steps=20, precision=precision),
        optim=Optim(lr=1e-3),
    )
    mesh = Mesh.build(Layout(), torch.device(device))
    assert mesh is not None
    return build(resolve(config), mesh)


def test_initial_weights_are_bit_identical_to_those_made_on_a_cpu(one_rank) -> None:
    on_cpu, on_gpu = (dict(job_on(device, "fp32").named_parameters()) for device in ("cpu", "cuda"))
    for name, param in on_cpu.items():
        assert torch.equal(param.to_local(), on_gpu[name].to_local().cpu()), name


def test_float64_training_equals_the_cpu(one_rank) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        job = job_on(device, "fp64")
        losses.append([train_step(job, random_batch(job, 0), step).read().loss for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_bf16_training_learns_a_batch_by_heart(one_rank) -> None:
    job = job_on("cuda", "bf16")
    losses = [train_step(job, random_batch(job, 0), step).read().loss for step in range(20)]
    assert losses[-1] < 0.7 * losses[0]
