"""Hugging Face transformers' Llama, trained from our initial weights, with which `megalite-bench-step` compares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.train.build import Job
from megalite_tools.bench.training.peers import adamw

try:
    from megalite_tools.bench.training.huggingface import llama
except ImportError:  # optional: pip install megalite[hf]
    llama = None  # type: ignore[assignment]

Step = Callable[[Tensor, int], tuple[float, float]]  # (batch [m, b, s + 1], step number) → mean loss, gradient norm


def build_peer(job: Job, how: dict[str, Any]) -> Step:
    """The same training step with transformers: of float32 weights, under autocast if it computes in bf16.

    Layers are compiled as ours are, if they are.

    how: further arguments of `torch.optim.AdamW`.
    """
    optim, narrow = job.config.optim, job.config.train.dtype == "bf16"
    model = llama(job.config.model, {name: _plain(each) for name, each in job.named_parameters()}, torch.device("cpu"))
    if job.config.train.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = adamw(model, optim, **how)

    def step(batch: Tensor, number: int) -> tuple[float, float]:
        total = 0.0
        for micro in batch:
            tokens, targets = micro[:, :-1].contiguous(), micro[:, 1:].contiguous()
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                loss = model(tokens, labels=targets, shift_labels=targets).loss / len(batch)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def _plain(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local().detach()
