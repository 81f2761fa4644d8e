"""Hugging Face transformers' Llama as one of the implementations, with Liger's kernels if wanted."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.checkpoint.maps.llama import LLAMA
from megalite.config.errors import InputError
from megalite.config.schema import Config, Model
from megalite_tools.bench.training.peers import PeerStep, Runner, check_comparable, shard, uses_autocast
from megalite_tools.bench.training.weights import Weights, initial_weights, renamed

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:  # optional: pip install megalite[hf]
    LlamaForCausalLM = None  # type: ignore[assignment,misc]

LARGE_CHUNKS = 16  # times Liger's own memory of a chunk's logits: chunks of 4,096 tokens and more


def llama(model: Model, weights: Weights, device: torch.device) -> LlamaForCausalLM:
    """A Llama in training mode that uses the memory of megalite's `weights`, so that none is held twice."""
    with torch.device(device):
        built = LlamaForCausalLM(LlamaConfig(**{**LLAMA.config(model, "float32"), "use_cache": False}))
    built.set_attn_implementation("sdpa")
    theirs = renamed(weights, LLAMA.table(model))
    if model.tie_embeddings:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    built.load_state_dict(theirs, assign=True)
    built.tie_weights()
    return built.train()


class Losses(nn.Module):
    """A Llama with the sum of its losses, so that FSDP2 has one root around both."""

    def __init__(self, model: LlamaForCausalLM, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return self._loss(hidden.flatten(0, 1), self.model.lm_head.weight, targets.flatten())


def _head_and_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of losses, from logits that are widened to float32 as transformers' own loss does."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def _liger(tuned: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Put Liger's kernels into the Llamas that are built from now on. Returns its head and loss in one."""
    if find_spec("liger_kernel") is None:
        raise InputError("liger is not installed; pip install liger-kernel")
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: PLC0415 - optional
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # noqa: PLC0415

    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)  # `Losses` calls it itself
    how: dict[str, Any] = {"accum_dtype": torch.float32, "chunk_mem_const": LARGE_CHUNKS} if tuned else {}
    return partial(liger_fused_linear_cross_entropy, reduction="sum", **how)


def build(config: Config, device: torch.device, tuned: bool, liger: bool = False) -> Runner:
    """Transformers' training step. Raises InputError where it or Liger is missing, or cannot train the case."""
    name = "liger" if liger else "transformers"
    check_comparable(config, name)
    if LlamaForCausalLM is None:
        raise InputError("transformers is not installed; pip install 'megalite[hf]'")
    if liger and device.type != "cuda":
        raise InputError("liger's kernels need a GPU: Triton's interpreter does not run them")
    if config.train.recompute == "selective":
        raise InputError(f"{name} has no selective recompute")
    loss = _liger(tuned) if liger else _head_and_loss
    model = llama(config.model, initial_weights(config.model, config.run.seed, device), device)
    layers = model.model.layers
    if config.train.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.train.compile:
        for layer in layers:
            layer.compile()
        if tuned and not liger:
            loss = torch.compile(loss)
    whole, autocast = Losses(model, loss), uses_autocast(config, tuned)
    if not autocast:
        apart = [] if config.model.tie_embeddings else [model.model.embed_tokens]
        shard(whole, [*layers, *apart], config, device)
    return PeerStep(whole, whole, config, device, autocast)
