"""Hugging Face transformers' Llama, trained from our initial weights, with which `megalite-bench-step` compares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.checkpoint.maps.llama import LLAMA
from megalite.config.schema import Model, Optim
from megalite.train.build import Job

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:  # optional: pip install megalite[hf]
    LlamaForCausalLM = None  # type: ignore[assignment,misc]

Step = Callable[[Tensor, int], tuple[float, float]]  # (batch [m, b, s + 1], step number) → mean loss, gradient norm


def build_peer(job: Job, adamw: dict[str, Any]) -> Step:
    """The same training step with transformers. adamw: further arguments of `torch.optim.AdamW`."""
    optim = job.config.optim
    model = _model(job)
    optimizer = _optimizer(model, optim, adamw)

    def step(batch: Tensor, number: int) -> tuple[float, float]:
        total = 0.0
        for micro in batch:
            tokens, targets = micro[:, :-1].contiguous(), micro[:, 1:].contiguous()
            loss = model(tokens, labels=targets, shift_labels=targets).loss / len(batch)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def _model(job: Job) -> LlamaForCausalLM:
    """Transformers' model. It uses the memory of our initial weights, so that no weight is held twice."""
    model = LlamaForCausalLM(_config(job.config.model))
    model.set_attn_implementation("sdpa")
    ours = {name: _plain(param) for name, param in job.named_parameters()}
    weights = {name: ours[theirs.strips[0].name] for name, theirs in LLAMA.table(job.config.model).items()}
    if job.config.model.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.train()


def _optimizer(model: nn.Module, optim: Optim, adamw: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer, with the same two parameter groups as ours."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, **adamw)


def _config(model: Model) -> LlamaConfig:
    return LlamaConfig(**{**LLAMA.config(model, "float32"), "use_cache": False})


def _plain(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local().detach()
