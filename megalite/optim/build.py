"""Builds the optimizer of one rank's parameters."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megalite.config.model_schema import Model
from megalite.config.schema import Kernels, Optim
from megalite.optim.host_adamw import HostAdamW
from megalite.optim.interface import Optimizer
from megalite.optim.muon import Muon, MuonWithAdamW
from megalite.optim.scratch_file import NoFile, ScratchFile
from megalite.optim.states import DeviceStates, FileStates, HostStates, local
from megalite.optim.streamed_adamw import StreamedAdamW
from megalite.parallel.copies import Copies
from megalite.parallel.parameter import Parameter, copy_of, trainable
from megalite.plan.model.optimizer_states import ADAMW_STATES, MUON_STATES, uses_muon
from megalite.plan.model.parametrization import Scales, scales
from megalite.plan.state_streams import padded, slot_bytes
from megalite_kernels import FusedAdamW, adamw, apex, fastest_adamw, fused_adamw
from megalite_kernels.backend import wide_dtype


def build_optimizer(
    stages: Iterable[nn.Module],
    model: Model,
    optim: Optim,
    kernels: Kernels | None = None,
    group: dist.ProcessGroup | None = None,
    copies: Iterable[Copies] = (),
    device: torch.device | None = None,
) -> Optimizer:
    """The optimizer `optim.name` for the trained parameters of `stages`, which are parts of `model`.

    kernels: the configuration's, of which those of optimizers are read; None: auto. group: all ranks that hold parts of
    these stages, which Muon needs; None: this rank holds them whole. copies: of parameters; every step makes them equal
    to these. device: where updates run, if parameters that are trained are on the host; None: they are on the device.
    """
    optimizer = _optimizer(stages, model, optim, kernels, group, device)
    for each in copies:
        optimizer.register_step_post_hook(each.refresh)
    return optimizer


def _optimizer(
    stages: Iterable[nn.Module],
    model: Model,
    optim: Optim,
    kernels: Kernels | None,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> Optimizer:
    muons: list[Parameter] = []
    others: list[Parameter] = []
    for stage in stages:
        for found in trainable(stage):
            (muons if uses_muon(optim, found.role) else others).append(found)
    kernels, groups = kernels or Kernels(), alike(others, model, optim)
    first, second = optim.betas
    states = _store(optim, muons, others, device)
    parameters = None if device is None or isinstance(states, DeviceStates) else HostStates(states.slot_bytes, device)
    updates: dict[str, Callable[..., None]] = {
        "auto": fastest_adamw,
        "triton": partial(adamw, backend="triton"),
        "torch": fused_adamw,
        "apex": apex.adamw,
    }
    update = updates[kernels.adamw]
    if isinstance(states, HostStates) and optim.update_on == "host":
        rest: FusedAdamW = HostAdamW(groups, optim.lr, (first, second), optim.eps, states, device is not None)
    elif not isinstance(states, DeviceStates):
        rest = StreamedAdamW(groups, optim.lr, (first, second), optim.eps, states, update, copy_of, parameters)
    else:
        rest = FusedAdamW(
            groups,
            optim.lr,
            (first, second),
            optim.eps,
            update=update,
            zeros=states.zeros,
            copy_of=copy_of,
        )
    if not muons:
        return rest
    stores = {"states": states, "parameters": parameters}
    settings = {**vars(optim.muon), **stores, "backend": kernels.muon, "copy_of": copy_of}
    return MuonWithAdamW(Muon(alike(muons, model, optim), group, **settings), rest)


def _store(
    optim: Optim, muons: Sequence[Parameter], others: Sequence[Parameter], device: torch.device | None
) -> DeviceStates | HostStates | FileStates:
    """The store of the states of matrices that Muon updates, and of other parameters. Raises InputError for a folder
    that cannot hold them."""
    if optim.place == "device":
        return DeviceStates()
    parts = [local(found.value) for found in muons]
    slot = slot_bytes(max((part[(0,) * (part.ndim - 2)].nbytes for part in parts if part.numel()), default=0))
    if optim.place == "host":
        return HostStates(slot, device)
    momenta = [padded(part.nbytes) * len(MUON_STATES) for part in parts]
    rest = [local(found.value) for found in others]
    moments = [padded(part.numel() * wide_dtype(part.dtype).itemsize) * len(ADAMW_STATES) for part in rest]
    has_data = not any(part.is_meta or isinstance(part, FakeTensor) for part in (*parts, *rest))
    size = sum(momenta) + sum(moments)
    return FileStates(ScratchFile(optim.placement, size, "optim.placement") if has_data else NoFile(), slot, device)


def alike(parameters: Iterable[Parameter], model: Model, optim: Optim) -> list[dict[str, Any]]:
    """Parameter groups: parameters with the same settings, those with weight decay first; of none, an empty group.

    `lr_scale` of a group is the factor of its learning rate, see `interface.set_rate`.
    """
    found: dict[Scales, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(scales(model, optim, parameter.role), []).append(parameter)
    alone = {Scales(1.0, 0.0, optim.eps): list[Parameter]()}  # PyTorch's optimizers need a group
    return [
        {
            "params": [parameter.value for parameter in group],
            "rate": optim.lr,
            "lr_scale": each.lr,
            "lr": optim.lr * each.lr,
            "weight_decay": each.weight_decay,
            "eps": each.eps,
        }
        for each, group in sorted((found or alone).items(), key=lambda item: item[0].weight_decay == 0)
    ]
