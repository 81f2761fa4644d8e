"""Collectives on one tensor under the name that this version of torch gives them (2.13 renamed both)."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name by which a custom op finds `group`; empty if there is no other rank."""
    return group.group_name if group is not None and group.size() > 1 else ""


def group_named(name: str) -> dist.ProcessGroup | None:
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]
