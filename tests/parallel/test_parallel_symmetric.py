"""Products fused with collectives of tensor parallelism, by what PyTorch has for CPUs: what they compute."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_cases import whole
from ranks import Ranks
from shared_files import shared_files
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_jobs import CPU, MODEL, config_of

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Base, Latent
from megalite.config.parallel_schema import DataParallel, Parallel, TensorParallel
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.parallel.copies import Copies
from megalite.parallel.symmetric import prepare
from megalite.parallel.tensor import ColumnLinear, columns, use_symmetric
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import UP_PROJECTION
from megalite.plan.parts.sizes import Sizes
from megalite.plan.pipeline import uses_copies
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh
from megalite.train.step import gradients

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


class _Operations(TorchDispatchMode):
    """Names of PyTorch's operations on symmetric memory, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "symm_mem":
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def computed(config: Config) -> tuple[float, dict[str, Tensor], list[str]] | None:
    """A rank's loss of a batch, its gradients, as whole tensors, and the fused operations."""
    mesh = build_mesh(config, CPU)
    if mesh is None:
        return None
    job = build(resolve(config), mesh)
    with _Operations() as operations:
        loss = gradients(job, random_batch(job, 0))
    return loss.item(), whole(job), operations.found


SYMMETRIC = TensorParallel("symmetric")
LATENT = {"qkv_bias": False, "head_width": 6, "rotary_width": 4, "attention": Attention(latent=Latent(7, 5, 4))}
COMPLETEP = {"parametrization": "completep", "base": Base(4, 3, 3)}  # factors of outputs
# Layouts, models, recompute, and how often a layer gathers and scatters in a pass. Forward gathers the inputs of two
# parts and scatters their outputs; backward gathers two gradients, and scatters none that is a sum of several products.
CASES: dict[str, tuple[Parallel, dict[str, Any], Any, tuple[int, int]]] = {
    "full recompute": (Parallel(tp=2, dp_shard=1), {}, "full", (6, 3)),
    "four ranks, zero3": (Parallel(tp=4, dp_shard=2, data=DataParallel("zero3")), {}, "selective", (4, 2)),
    "split backward": (Parallel(tp=2, pp=2, dp_shard=1), {}, "none", (4, 2)),
    "factors": (Parallel(tp=2, dp_shard=1), COMPLETEP, "none", (4, 2)),
    "latent": (Parallel(tp=2, dp_shard=1), LATENT, "none", (5, 3)),  # and queries by themselves
}


def fused(config: Config) -> Config:
    return replace(config, parallel=replace(config.parallel, tensor=SYMMETRIC))


@pytest.mark.parametrize("case", CASES)
def test_fused_products_compute_what_products_beside_collectives_do(case: str, ranks: Ranks) -> None:
    parallel, model, recompute, (gathers, scatters) = CASES[case]
    schedule = "zb_h1" if parallel.pp > 1 else "1f1b"
    config = config_of(Layout(), replace(MODEL, heads=4, kv_heads=4, **model), schedule)
    config = replace(
        config,
        parallel=replace(parallel, pipeline=config.parallel.pipeline),
        train=replace(config.train, recompute=recompute),
    )
    world, data = parallel.layout.world_size, parallel.layout.dp
    passes = config.batch.global_ // data // config.batch.micro_size * MODEL.layers // parallel.pp
    apart, together = (ranks.run(computed, each)[:world] for each in (config, fused(config)))
    for (loss, grads, found), (expected_loss, expected, none) in zip(together, apart, strict=True):
        assert not none
        assert Counter(found) == {GATHER: passes * gathers, SCATTER: passes * scatters}
        assert loss == pytest.approx(expected_loss, rel=1e-13)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_fused_products_compute_with_copies_of_weights(schedule: str, ranks: Ranks) -> None:
    layout = Layout(tp=2, pp=2 if schedule == "zb_h1" else 1)
    config = config_of(layout, replace(MODEL, heads=4, kv_heads=4), schedule)
    config = replace(config, train=replace(config.train, precision="bf16"))
    assert uses_copies(config)
    apart, together = (ranks.run(computed, each)[: layout.world_size] for each in (config, fused(config)))
    for (loss, grads, found), (expected_loss, expected, _) in zip(together, apart, strict=True):
        assert set(found) == {GATHER, SCATTER}
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert grads[name].dtype == torch.float32
            assert (grads[name] - grad).norm() <= 2**-7 * grad.norm(), name


class Sharing(nn.Module):
    """Two layers of one input, whose weights lie one after the other."""

    share_input = ("first", "second")

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.group = mesh.tp.get_group()
        self.first, self.second = (
            ColumnLinear(Weight((2 * rows, 4), UP_PROJECTION), mesh.tp, Weight((2 * rows,), UP_PROJECTION.bias))
            for rows in (3, 2)
        )
        self.double().to_empty(device="cpu")
        generator = torch.Generator().manual_seed(self.group.rank())
        for weight in self.parameters():
            nn.init.normal_(weight.data.to_local(), generator=generator)


def through_joint_weights(symmetric: bool) -> tuple[list[Tensor], list[str]] | None:
    """Outputs and gradients of layers whose outputs' gradients are parts of one tensor, and the fused operations."""
    mesh = Mesh.build(Layout(tp=2), CPU)
    if mesh is None:
        return None
    layers = Sharing(mesh)
    Copies(layers, torch.float64).refresh()
    if symmetric:
        use_symmetric(layers)
    x = torch.arange(24, dtype=torch.float64).add(mesh.rank).reshape(3, 2, 4).requires_grad_()
    with _Operations() as operations:
        outputs = columns(x, (layers.first, layers.second), layers.group)
        torch.cat(outputs, dim=-1).square().sum().backward()
    found = [*outputs, x.grad, *(weight.grad.to_local() for weight in layers.parameters())]
    return [each.detach() for each in found if each is not None], operations.found


def test_one_product_makes_the_gradient_of_an_input_that_is_scattered(ranks: Ranks) -> None:
    apart, together = (ranks.run(through_joint_weights, symmetric)[:2] for symmetric in (False, True))
    for (found, operations), (expected, none) in zip(together, apart, strict=True):
        assert (operations, none) == ([GATHER, SCATTER], [])
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def through_files(config: Config, folder: Path) -> tuple[float, dict[str, Tensor], int] | None:
    """A rank's loss and gradients by PyTorch's code for GPUs, and the bytes of its memory that peers read."""
    prepare()
    with shared_files(folder) as sizes:
        found = computed(config)
    return None if found is None else (*found[:2], max(sizes))


@pytest.mark.parametrize("case", ["full recompute", "four ranks, zero3", "latent"])
def test_what_pytorch_runs_on_gpus_computes_the_same_in_the_memory_that_is_predicted(
    case: str, tmp_path: Path, ranks: Ranks
) -> None:
    """Its pipelines of parts, with memory of files in place of GPUs'."""
    parallel, model, recompute, _ = CASES[case]
    config = config_of(Layout(), replace(MODEL, heads=4, kv_heads=4, **model))
    config = replace(config, parallel=parallel, train=replace(config.train, recompute=recompute))
    world, through = parallel.layout.world_size, ranks.run(through_files, fused(config), tmp_path)
    for (loss, grads, size), (expected_loss, expected, _) in zip(
        through[:world], ranks.run(computed, config)[:world], strict=True
    ):
        assert size == Sizes(fused(config)).shared_buffer
        assert loss == pytest.approx(expected_loss, rel=1e-13)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-12, atol=1e-14), name


def joint_through_files(folder: Path) -> tuple[list[Tensor], list[str]] | None:
    prepare()
    with shared_files(folder):
        return through_joint_weights(symmetric=True)


def test_what_pytorch_runs_on_gpus_takes_joint_weights_and_gradients(tmp_path: Path, ranks: Ranks) -> None:
    together, apart = ranks.run(joint_through_files, tmp_path)[:2], ranks.run(through_joint_weights, False)[:2]
    for (found, _), (expected, _) in zip(together, apart, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
