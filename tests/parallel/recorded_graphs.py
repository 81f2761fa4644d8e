"""A device on a CPU that captures graphs as CUDA does: it notes operations with their tensors, and does them again.

A replay runs no Python but that of operations: numbers that the host knew are those of the capture, tensors are where
they were, and no version of a tensor rises. A collective takes and gives its numbers where it is waited for, the last
moment at which a GPU's stream may do so, and has to be waited for within the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ops = torch.ops.aten
# Operations whose results the host reads, or whose sizes it cannot know.
OF_THE_HOST = {ops._local_scalar_dense, ops.equal, ops.nonzero, ops.is_nonzero, ops.masked_select}
# Operations that write nothing: what is in their results comes from others, or is nonsense.
ALLOCATIONS = {ops.empty, ops.empty_like, ops.empty_strided, ops.new_empty, ops.new_empty_strided}
COLLECTIVES = {
    *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"),
    *(f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")),
}
WAIT = torch.ops._c10d_functional.wait_tensor  # in compiled layers
Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class Recording(TorchDispatchMode):
    """Notes operations, and what they have found in memory that they have not made themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        # Collectives that nobody has waited for yet, by the address of their work, which is kept, or of their result.
        self.begun: dict[int, tuple[dist.Work | None, Call]] = {}
        self.made: dict[int, Tensor] = {}  # by storage
        self.found: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: bytes, and a copy of them

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled layers stay so; their operations are noted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the operations on its part come by themselves
        from_list = func.overloadpacket is ops.lift_fresh and args[0].ndim > 0  # numbers alone are a CPU's constants
        if func.overloadpacket is WAIT:
            self.waited(place(args[0]))
            return func(*args)
        collective = func.namespace in ("c10d", "_c10d_functional")
        refused = collective and func._schema.name not in COLLECTIVES
        if func.overloadpacket in OF_THE_HOST or from_list or refused:
            raise AssertionError(f"{func} cannot be in a graph")
        for tensor in tensors((args, kwargs)):
            if place(tensor) not in self.made and place(tensor) not in self.found:
                whole = whole_of(tensor)
                self.found[place(tensor)] = whole, whole.clone()
        result = func(*args, **kwargs or {})
        self.made |= {place(tensor): tensor for tensor in tensors(result) if place(tensor) not in self.found}
        call = func, args, kwargs or {}, result
        if collective:
            (work,) = works_of(result) or (None,)
            self.begun[place(tensors(result)[0]) if work is None else id(work)] = work, call
        elif func.overloadpacket not in ALLOCATIONS:
            self.calls.append(call)
        return result

    def waited(self, begun: int) -> None:
        """Note that a collective is waited for: it is done here."""
        assert begun in self.begun, "waits for a collective that is not in the graph"
        self.calls.append(self.begun.pop(begun)[1])

    @contextmanager
    def noting_waits(self) -> Iterator[None]:
        """Note collectives that are waited for meanwhile, which all that are begun have to be."""
        wait = dist.Work.wait

        def noted(work: dist.Work, *args: Any) -> Any:
            self.waited(id(work))
            with _disable_current_modes():  # in it gloo copies, as a part of the collective
                return wait(work, *args)

        with patch.object(dist.Work, "wait", noted):
            yield
        assert not self.begun, f"not waited for: {[str(func) for _, (func, *_) in self.begun.values()]}"

    def undo(self) -> None:
        """Leave memory as it was, since a capture does nothing."""
        for whole, before in self.found.values():
            whole.copy_(before)
        self.spoil()

    def spoil(self) -> None:
        """Leave nonsense in all that was made, as other graphs may."""
        for tensor in self.made.values():
            whole_of(tensor).fill_(0xFF)  # nan, and −1


class RecordedGraphs:
    """Takes the place of `CudaGraphs`. operations: those of each graph."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []
        self.replays = 0

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        seed = torch.get_rng_state()
        recording = Recording()
        with recording.noting_waits(), recording:
            work()
        assert seed.equal(torch.get_rng_state()), "every replay would draw the same numbers"
        recording.undo()
        self.operations.append([str(func) for func, *_ in recording.calls])

        def replay() -> None:
            self.replays += 1
            recording.spoil()
            with torch._C._AutoDispatchBelowAutograd():
                for func, args, kwargs, result in recording.calls:
                    given = {place(tensor) for tensor in tensors((args, kwargs))}
                    again = func(*args, **kwargs)
                    for working in works_of(again):
                        working.wait()
                    if func.namespace == "_c10d_functional":
                        WAIT(again)
                    for old, new in zip(tensors(result), tensors(again), strict=True):
                        if place(old) not in given:
                            old.copy_(new)

        return replay


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def works_of(tree: Any) -> list[dist.Work]:
    """Collectives that an operation has begun."""
    objects = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.ScriptObject)]
    return [dist.Work.unbox(each) for each in objects if each._type().name() == "Work"]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def whole_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
