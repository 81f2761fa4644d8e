"""Collectives and messages of a rank, counted one by one while code runs, on real or on fake tensors.

A dispatch mode sees each of them, whoever starts it: this program, FSDP2 or DTensor.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.distributed.mesh import EXPERT_AXES, Mesh
from megalite.dry_run.live_bytes import COUNTED_TYPES
from megalite.plan.parts.transfers import Transfer

KINDS = {  # operation of PyTorch -> kind of a `Transfer`
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "symm_mem::fused_all_gather_matmul": "all_gather",
    "symm_mem::fused_matmul_reduce_scatter": "reduce_scatter",
}
NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")
SILENT_OPERATIONS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")  # they send nothing


class CountedTransfers(TorchDispatchMode):
    """Counts transfers while active, in `found`.

    axes: by name of a process group, its axis; see `axes_of`. Raises RuntimeError for an operation or a group that it
    does not know, so no transfer is left out in silence.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self.found: Counter[Transfer] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in COUNTED_TYPES for kind in types):
            return NotImplemented
        given = kwargs or {}
        result = func(*args, **given)
        if func.namespace in NAMESPACES:
            name = func.name().partition(".")[0]
            if name not in SILENT_OPERATIONS:
                self.found[self._transfer(name, [*args, *given.values()], result)] += 1
        return result

    def _transfer(self, name: str, given: list[Any], result: Any) -> Transfer:
        if name not in KINDS:
            raise RuntimeError(f"{name} is a collective that nobody counts yet; add it to dry_run.transfers.KINDS")
        axes = [self._axes[group] for value in given if (group := _group_name(value)) in self._axes]
        if len(axes) != 1:
            raise RuntimeError(f"{name} runs over a group that is no axis of the mesh")
        if name.startswith("symm_mem"):
            return _of_fused(KINDS[name], axes[0], given[0], result)
        # The whole tensor is the largest of what goes in and of what comes out.
        sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*given, result)]
        sizes = [sum(tensor.nbytes for tensor in side) for side in sides]
        (first, *_) = sides[sizes.index(max(sizes))]
        return Transfer(KINDS[name], axes[0], max(sizes), str(first.dtype).removeprefix("torch."))


def _of_fused(kind: str, axis: str, x: Tensor, result: Any) -> Transfer:
    """The transfer of an operation that also multiplies: of its input `x` before, or of its result afterwards."""
    part, rows = (x, len(result[1][0])) if kind == "all_gather" else (result, len(x))
    return Transfer(kind, axis, part.nbytes * rows // len(part), str(part.dtype).removeprefix("torch."))


def with_world_apart(mesh: Mesh) -> Mesh:
    """The mesh with a group of its own for what all ranks sum, whose axis `axes_of` can tell then.

    In a job that is the group of an axis too, if one has all ranks. Collective over all processes.
    """
    world = dist.new_group(group_desc="world")
    return replace(mesh, world=world, stage=world if mesh.stage == mesh.world else mesh.stage)


def axes_of(mesh: Mesh) -> dict[str, str]:
    """By name of a process group of `mesh`: its axis. A group that is several axes' has the first of their names."""
    groups = {axis: mesh.group(axis) for axis in ("tp", "fsdp", "dp_replicate", "pp")}
    others = {"cp": mesh.cp, "world": mesh.world, "stage": mesh.stage}
    if mesh.experts is not None:
        others |= {axis: mesh.experts.get_group(axis) for axis in EXPERT_AXES}
    found: dict[str, str] = {}
    found |= {pair.group_name: "pp" for pair in mesh.pairs}
    for axis, group in (groups | {axis: group for axis, group in others.items() if group is not None}).items():
        found.setdefault(group.group_name, axis)
    return found


def _group_name(value: Any) -> str:
    """The name of the process group that an argument of an operation is or names; "" or another text if it is none."""
    if isinstance(value, torch.ScriptObject):
        with suppress(RuntimeError):  # another object, such as the operation of a reduction
            return dist.ProcessGroup.unbox(value).group_name
    return value if isinstance(value, str) else ""
