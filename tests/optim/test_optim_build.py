"""The optimizer: what decays, and that its fused step is plain AdamW."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Optim, Train
from megalite.distributed.mesh import Mesh
from megalite.optim.build import build_optimizer
from megalite.plan.resolved import resolve
from megalite.train.build import Job, build
from megalite.train.step import train_step

MODEL = Model(
    layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab_size=32, sequence_length=8, qk_norm=True, qkv_bias=True
)
CONFIG = Config(
    model=MODEL,
    parallel=Parallel(dp_shard=1),
    batch=Batch(micro=2, global_=4),
    train=Train(steps=5, precision="fp64"),
    optim=Optim(lr=0.01, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3, clip_norm=0.0),
)


@pytest.fixture
def job() -> Iterator[Job]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    yield build(resolve(CONFIG), mesh)
    dist.destroy_process_group()


def test_matrices_decay_and_vectors_do_not(job: Job) -> None:
    decay = {id(param): group["weight_decay"] for group in job.optimizer.param_groups for param in group["params"]}
    for name, param in job.named_parameters():
        assert decay[id(param)] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name


def test_every_parameter_is_in_one_group(job: Job) -> None:
    grouped = [id(param) for group in job.optimizer.param_groups for param in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(param) for _, param in job.named_parameters()}


def test_settings_reach_the_optimizer(job: Job) -> None:
    for group in job.optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)


def test_a_group_that_would_be_empty_is_left_out(job: Job) -> None:
    (stage,) = job.stages.values()
    layer = stage.layers["0"]
    assert [
        len(build_optimizer(modules, MODEL, Optim()).param_groups) for modules in ([layer.mlp], [layer.mlp_norm])
    ] == [
        1,
        1,
    ]


def test_a_step_is_adamw_on_plain_tensors(job: Job) -> None:
    plain = {name: param.to_local().detach().clone() for name, param in job.named_parameters()}  # type: ignore[attr-defined]
    first = {name: torch.zeros_like(value) for name, value in plain.items()}
    second = {name: torch.zeros_like(value) for name, value in plain.items()}
    constant = replace(job.config, schedule=replace(job.config.schedule, name="constant"))
    job.plan = replace(job.plan, config=constant)
    captured: dict[str, torch.Tensor] = {}

    def capture(*_: object) -> None:
        captured.update({name: param.grad.to_local().clone() for name, param in job.named_parameters()})  # type: ignore[union-attr]

    job.optimizer.register_step_pre_hook(capture)
    for step in range(3):
        train_step(job, random_batch(job, step), step)
        for name, value in plain.items():
            grad, decay = captured[name], 0.3 if value.ndim > 1 else 0.0
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.9 * second[name] + 0.1 * grad**2
            mean, square = first[name] / (1 - 0.8 ** (step + 1)), second[name] / (1 - 0.9 ** (step + 1))
            plain[name] = value * (1 - 0.01 * decay) - 0.01 * mean / (square.sqrt() + 1e-6)
    for name, param in job.named_parameters():
        torch.testing.assert_close(param.to_local(), plain[name], rtol=1e-12, atol=1e-14, msg=name)  # type: ignore[attr-defined]


def test_gradients_are_gone_after_a_step(job: Job) -> None:
    train_step(job, random_batch(job, 0), 0)
    assert all(param.grad is None for _, param in job.named_parameters())
