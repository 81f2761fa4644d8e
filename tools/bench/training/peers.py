"""Sharding, optimizer and training step that all implementations beside megalite share.

As shipped, on one GPU, they keep float32 weights and compute under autocast. Tuned, or on several GPUs, FSDP2 keeps
float32 weights and computes with bf16 copies, as megalite does. Every other setting is that of the case.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megalite.base.errors import InputError
from megalite.config.model_schema import Attention
from megalite.config.parametrization import Multipliers, multipliers
from megalite.config.schema import Config, Optim
from megalite.parallel.fsdp import compute_dtype

SumOfLosses = Callable[[Tensor, Tensor], Tensor]  # (tokens [b, s], targets [b, s]) → the sum over all tokens


class Runner(Protocol):
    """One implementation, ready to train."""

    def __call__(self, tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Take optimizer step `number` on this rank's `[m, b, s + 1]` tokens. Nothing waits for the device.

        Returns the mean loss of all ranks' tokens and the norm of the gradients, as tensors on the device.
        """
        ...


class PeerStep:
    """A training step of a model that is not megalite's."""

    def __init__(self, model: nn.Module, loss: SumOfLosses, config: Config, device: torch.device, autocast: bool):
        self._model, self._loss, self._config, self._device = model, loss, config, device
        self._autocast = autocast
        self._optimizer = adamw(model, config.optim, fused=True)

    def __call__(self, tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
        scale = 1 / (tokens[..., 1:].numel() * dist.get_world_size())
        total = torch.zeros((), device=self._device)
        for place, micro in enumerate(tokens, 1):
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(place == len(tokens))
            with self._context():
                loss = self._loss(micro[:, :-1], micro[:, 1:]) * scale
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total, norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _context(self) -> AbstractContextManager[object]:
        dtype = compute_dtype(self._config.train.dtype)
        return torch.autocast(self._device.type, dtype) if self._autocast else nullcontext()


def uses_autocast(config: Config, tuned: bool) -> bool:
    """Return whether the weights are cast by autocast, not by FSDP2."""
    return config.train.dtype == "bf16" and not tuned and dist.get_world_size() == 1


def adamw(model: nn.Module, optim: Optim, **more: bool) -> torch.optim.AdamW:
    """PyTorch's AdamW with megalite's two groups of parameters. more: arguments such as `fused`."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, **more)


def shard(model: nn.Module, groups: Iterable[nn.Module], config: Config, device: torch.device) -> None:
    """Shard a model over all ranks, with sums of gradients in float32.

    groups: modules that are gathered one by one, such as layers; the rest is gathered together.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(config.train.dtype), reduce_dtype=torch.float32)
    zero3 = config.parallel.data_mode == "zero3"
    for module in groups:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 add up gradients: losses are divided by the tokens of all ranks already.

    On one rank there is nothing to divide, and a factor would cost a pass over all gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_world_size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check_comparable(config: Config, name: str) -> None:
    """Raises InputError for a configuration that another program does not train alike."""
    model, layout = config.model, config.parallel.layout
    if model.norm != "pre" or model.qk_norm or model.qkv_bias or model.out_bias or model.attention != Attention():
        raise InputError(f"{name} is compared on plain Llamas: model.norm pre, no qk_norm, biases, model.attention")
    if model.norm_gain != "weight" or model.activation != "silu" or model.logits_softcap is not None:
        raise InputError(f"{name} is compared on plain Llamas: no model.norm_gain, activation or logits_softcap")
    if model.parametrization != "standard" or multipliers(model) != Multipliers():
        raise InputError(f"{name} has no model.parametrization but standard, and no multipliers")
    if layout.dp != layout.world_size:
        raise InputError(f"{name} is compared in data-parallel layouts only; this one is {layout}")
    if config.optim.name != "adamw" or config.optim.clip_norm == 0 or config.optim.place != "device":
        raise InputError(f"{name} is compared with optim.name adamw, clipping, and states on the device")
    if config.train.offload_activations or config.train.recompute == "budget":
        raise InputError(f"{name} has no train.offload_activations and no budget of recompute")
