"""Parameters in host memory, copied to the device ahead of use and dropped after it; gradients are reduced to the host.

FSDP2 does this for parameters that it is told to offload: it copies each shard on the stream that gathers it, while the
layer before computes, and copies reduced gradients to the host. But where one rank has a whole group, FSDP2 gathers
nothing and copies on the stream of compute, which waits for it. `CopiedAhead` copies such a group on a stream of its
own, when FSDP2 asks for the next one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from megalite.parallel.fsdp import groups_of
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.parameter import dtensor
from megalite.plan.state_streams import CAST_BYTES


class CopiedAhead(FSDPParamGroup):
    """A group of FSDP2 that one rank has whole, whose copies to the device are begun by `unshard`."""

    memory: HostMemory
    arrived: torch.cuda.Event | None

    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> None:
        """Begin to copy the group, once all that computes now has ended: it may use the memory that the group gets.

        A module that is made again in backward asks for the next one of forward, too, whose backward is over.
        """
        if not (self._training_state == TrainingState.FORWARD and torch._C._current_graph_task_id() >= 0):
            self._begin()

    def _begin(self) -> None:
        if self.is_unsharded:
            return
        stream = self.memory.stream
        if stream is None:
            self._copy()
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._copy()
        self.arrived = stream.record_event()

    def wait_for_unshard(self) -> None:
        """Let what computes from now on wait for the group."""
        self._begin()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def _copy(self) -> None:
        for param in self.fsdp_params:
            shard = param._sharded_param_data
            dtype = param.param_dtype or shard.dtype
            param.init_all_gather_outputs([shard.numel()], [dtype], 1, self.device)
            (whole,) = param.all_gather_outputs
            whole.untyped_storage().resize_(whole.nbytes)
            with torch.autograd._unsafe_preserve_version_counter(whole):
                if shard.dtype == dtype or not param.offload_to_cpu:
                    whole.copy_(shard, non_blocking=True)
                else:
                    _copy_cast(shard, whole)
            param.init_unsharded_param()
        self._to_unsharded()


def _copy_cast(host: Tensor, whole: Tensor) -> None:
    """Copy to the device and cast there, piece by piece, for the host would cast before it copies."""
    elements = CAST_BYTES // host.itemsize
    for source, target in zip(host.split(elements), whole.split(elements), strict=True):
        target.copy_(torch.empty_like(source, device=whole.device).copy_(source, non_blocking=True))


def keep_on_host(stage: nn.Module, device: torch.device, trained: bool) -> None:
    """Have `materialize` make the parameters of a sharded stage in host memory, for use on `device`.

    trained: those that are trained, too.
    """
    memory, groups = HostMemory(), groups_of(stage)
    stage.parameter_memory = memory  # type: ignore[assignment]
    for module in groups:
        group = _group_of(module)
        for param in _params_of(module):
            param.offload_to_cpu = trained or not param.sharded_param.requires_grad
            param.pin_memory = param.offload_to_cpu and device.type == "cuda"
        if group is not None and group.mesh_info.mesh.shape[-1] == 1:
            group.__class__ = CopiedAhead
            group.memory, group.arrived = memory, None
    for module, following in pairwise(groups):
        if isinstance(_group_of(following), CopiedAhead):
            module.set_modules_to_forward_prefetch([following])


def materialize(stage: nn.Module, device: torch.device) -> None:
    """Allocate the parameters and buffers of a stage, on `device`, or in host memory if `keep_on_host` has said so."""
    memory: HostMemory | None = getattr(stage, "parameter_memory", None)
    kept = {param.sharded_param for module in groups_of(stage) for param in _params_of(module) if param.offload_to_cpu}

    def allocate(tensor: Tensor) -> Tensor:
        if memory is None or tensor not in kept or device.type == "meta":
            return torch.empty_like(tensor, device=device)
        assert isinstance(tensor, DTensor)
        return dtensor(memory.empty_like(tensor._local_tensor, device), tensor._spec)

    stage._apply(allocate)


def _group_of(module: FSDPModule) -> Any:
    """The group of parameters that FSDP2 gathers for a module; None if it has none of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def _params_of(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's object for each parameter of a module's group."""
    group = _group_of(module)
    return () if group is None else group.fsdp_params
