"""Symmetric memory made of files, with which PyTorch's code for GPUs runs on CPU ranks: its streams do nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

SIZE = 1 << 16  # bytes of a rank's memory
OPERATIONS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


class Stream:
    """A stream on which everything is done at once."""

    def wait_stream(self, other: "Stream") -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class SharedFiles:
    """The memory of the ranks of a group, as `torch._C._distributed_c10d._SymmetricMemory` is."""

    def __init__(self, folder: Path, name: str) -> None:
        self.size = 0  # in use
        self.group = _resolve_process_group(name)
        self.rank, self.world_size = self.group.rank(), self.group.size()
        files = [str(folder / f"memory_{rank}") for rank in dist.get_process_group_ranks(self.group)]
        self.memory = [torch.from_file(file, shared=True, size=SIZE, dtype=torch.uint8) for file in files]

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(self.group)

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        first, count = storage_offset * dtype.itemsize, prod(shape) * dtype.itemsize
        assert first + count <= self.size, "more than was asked for"
        return self.memory[rank][first : first + count].view(dtype).view(*shape)


@contextmanager
def shared_files(folder: Path) -> Iterator[list[int]]:
    """Inside, products are fused by PyTorch's code for GPUs, through files in `folder`. Yields the sizes asked for."""
    symmetric_memory, sizes = import_module("torch.distributed._symmetric_memory"), list[int]()
    files_of = cache(partial(SharedFiles, folder))

    def workspace(name: str, min_size: int) -> SharedFiles:
        sizes.append(min_size)
        files = files_of(name)
        files.size = min_size
        return files

    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(patch.object(torch.ops.symm_mem, name, getattr(symmetric_memory, f"_{name}")))
        for owner, name, stand_in in (
            (symmetric_memory, "get_symm_mem_workspace", workspace),
            (symmetric_memory, "_get_backend_stream", lambda priority=0: Stream()),
            (torch.cuda, "current_stream", Stream),
            (torch.accelerator, "current_stream", Stream),
            (torch.cuda, "_sleep", lambda cycles: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield sizes
