"""Recompute and offload on a CUDA device: the same numbers in less memory; `make gpu` runs it."""

from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Optim, Run, Train
from megalite.distributed.mesh import Mesh
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.offload import to_host
from megalite.plan.resolved import resolve
from megalite.train.build import build
from megalite.train.step import train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAIN = Config(
    run=Run(device="cuda"),
    model=Model(layers=6, width=256, heads=4, kv_heads=2, ffn=768, vocab_size=512, sequence_length=1024),
    parallel=Parallel(dp_shard=1),
    batch=Batch(micro=4, global_=8),
    train=Train(steps=4, precision="fp64"),
)
LESS = {
    "selective": Train(steps=4, precision="fp64", recompute="selective"),
    "full": Train(steps=4, precision="fp64", recompute="full"),
    "offload": Train(steps=4, precision="fp64", offload_activations=True),
    "offload selective": Train(steps=4, precision="fp64", recompute="selective", offload_activations=True),
    "budget": Train(steps=4, precision="fp64", recompute="budget", recompute_budget=0.5),
}


def losses_and_peak(config: Config) -> tuple[list[float], int]:
    mesh = Mesh.build(Layout(), torch.device("cuda"))
    assert mesh is not None
    job = build(resolve(config), mesh)
    losses = []
    for step in range(4):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        losses.append(train_step(job, random_batch(job, step), step).read().loss)
    return losses, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("case", LESS)
def test_activations_take_less_memory_and_nothing_else_changes(case: str, one_rank: None) -> None:
    expected, most = losses_and_peak(PLAIN)
    losses, peak = losses_and_peak(replace(PLAIN, train=LESS[case]))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert peak < most


@pytest.mark.parametrize("case", ["host", "host, update there", "files"])
def test_optimizer_states_elsewhere_take_less_memory(case: str, one_rank: None, tmp_path: Path) -> None:
    optim = Optim(
        placement=str(tmp_path) if case == "files" else "host", update_on="host" if "there" in case else "device"
    )
    expected, most = losses_and_peak(PLAIN)
    losses, peak = losses_and_peak(replace(PLAIN, optim=optim))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert peak < most


def test_host_memory_is_page_locked_and_exact(one_rank: None) -> None:
    memory, tensor = HostMemory(), torch.rand(100_001, device="cuda")
    host = memory.empty_like(tensor)
    assert host.is_pinned()
    assert host.untyped_storage().nbytes() < tensor.nbytes + PAGESIZE
    to_host(tensor, host, memory.stream)
    memory.stream.synchronize()  # type: ignore[union-attr]
    assert torch.equal(host, tensor.cpu())
    memory.close()
    assert not host.is_pinned()
