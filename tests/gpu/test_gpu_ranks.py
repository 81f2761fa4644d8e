"""Two ranks on two GPUs, over NCCL, as users start them; `make gpu` runs it. On CPUs one case runs everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from warm_start import Popen, cold, run

from megalite.data.store_writer import StoreWriter

CONFIG = """
run: {dir: runs}
model: {layers: 2, width: 128, heads: 4, kv_heads: 2, ffn: 96, vocab_size: 64, sequence_length: 64}
batch: {micro: 2, global: 8}
train: {precision: fp64, timeout: 60}
optim: {lr: 0.01}
schedule: {name: constant}
data: {train: [{path: tokens}]}
log: {interval: 1}
"""
LAYOUTS = {
    "dp_shard": ["parallel.dp_shard=2"],
    "dp_shard, saved at once": ["parallel.dp_shard=2", "checkpoint.async=false"],
    "ddp": ["parallel.dp_shard=2", "parallel.data.mode=ddp"],
    "hsdp": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
    "pp": ["parallel.pp=2"],
    "pp, split backward": ["parallel.pp=2", "parallel.pipeline.schedule=zb_h1"],
    "tp": ["parallel.tp=2"],
    "tp, symmetric memory": ["parallel.tp=2", "parallel.tensor.overlap=symmetric"],
    "tp, symmetric memory, compiled": ["parallel.tp=2", "parallel.tensor.overlap=symmetric", "train.compile=true"],
    "tp, graphs": ["parallel.tp=2", "train.cuda_graph=true"],
    "tp, graphs, compiled": ["parallel.tp=2", "train.cuda_graph=true", "train.compile=true"],
    "cp": ["parallel.cp=2", "parallel.context.method=ulysses"],
    "ep": ["parallel.dp_shard=2", "parallel.ep=2"],
    "tp, ep": ["parallel.tp=2", "parallel.ep=2"],
}
EXPERTS = "model.experts={count: 4, active: 2, width: 48, balance_loss: 0.1}"
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def train(work: Path, name: str, device: str, steps: int, *overrides: str) -> dict[int, float]:
    """Losses by step of all of a run so far."""
    arguments = [f"run.name={name}", f"run.device={device}", f"train.steps={steps}", *overrides]
    start = Popen if device == "cpu" else cold
    ended = run(["-m", "megalite.commands.main", "train", "two.yaml", *arguments], 200, start, cwd=work)
    assert ended.returncode == 0, ended.stderr
    records = map(json.loads, (work / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("two")
    (work / "two.yaml").write_text(CONFIG)
    with StoreWriter(work / "tokens", "<u2") as writer:
        writer.add(np.arange(8000) * 7 % 61)
    return work


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ("dp_shard", "cpu"),
        ("tp, ep", "cpu"),
        ("tp, symmetric memory", "cpu"),
        *(pytest.param(layout, "cuda", marks=needs_two) for layout in LAYOUTS),
    ],
)
def test_two_ranks_train_as_one_does_which_goes_on_from_what_both_saved(layout: str, device: str, work: Path) -> None:
    name = f"{layout} {device}".replace(", ", " ").replace(" ", "_")
    model = [EXPERTS] if "ep" in layout else []
    expected = train(work, f"one_{name}", device, 4, *model)
    train(work, name, device, 2, *LAYOUTS[layout], *model)
    assert train(work, name, device, 4, *model) == pytest.approx(expected, rel=1e-10)


@needs_two
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_flash_attention_over_two_ranks_is_that_of_one(method: str, work: Path) -> None:
    narrow = "train.precision=bf16"
    spread = ["parallel.cp=2", f"parallel.context.method={method}"]
    expected = train(work, f"one_{method}", "cuda", 3, narrow)
    assert train(work, method, "cuda", 3, narrow, *spread) == pytest.approx(expected, rel=2**-7)
