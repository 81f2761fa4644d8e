"""Hugging Face transformers' Llama as one of the implementations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.llama import LLAMA
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.peers import PeerStep, Runner, check_comparable, shard, uses_autocast
from megalite_tools.bench.training.weights import Weights, initial_weights, renamed

HeadAndLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden [n, d], weight [v, d], targets [n]) → sum of losses


def build(case: Case, config: Config, device: torch.device) -> Runner:
    """Transformers' training step. Raises InputError for what it cannot train."""
    compiled = case.tuned and config.train.compile
    return with_loss(torch.compile(head_and_loss) if compiled else head_and_loss, case, config, device)


def with_loss(loss: HeadAndLoss, case: Case, config: Config, device: torch.device) -> Runner:
    """Transformers' training step with another head and loss. Raises InputError for what it cannot train."""
    check_comparable(config, case.implementation)
    if config.train.recompute == "selective":
        raise InputError(f"{case.implementation} has no selective recompute")
    model = llama(config.model, initial_weights(config.model, config.run.seed, device), device)
    layers = model.model.layers
    if config.train.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.train.compile:
        for layer in layers:
            layer.compile()
    whole, autocast = Losses(model, loss), uses_autocast(config, case.tuned)
    if not autocast:
        apart = [] if config.model.tie_embeddings else [model.model.embed_tokens]
        shard(whole, [*layers, *apart], config, device)
    return PeerStep(whole, whole, config, device, autocast)


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

    def __init__(self, model: LlamaForCausalLM, loss: HeadAndLoss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return self._loss(hidden.flatten(0, 1), self.model.lm_head.weight, targets.flatten())


def head_and_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of losses, from logits that are widened to float32 as transformers' own loss does."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
