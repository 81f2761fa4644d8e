"""Many tensors in one launch: a table of their addresses, in which every program finds its tensor and chunk."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels.backend import jit, power_of_2, tl

CHUNK = 16384  # elements of one program


class Launch(NamedTuple):
    """Tensors that one launch takes, and what it is given for them."""

    numbers: list[int]  # indices of the tensors
    lists: list[list[Tensor]]
    types: list[object]  # data type of each list, as Triton's
    table: Tensor
    programs: int
    options: dict[str, Any]  # constants of every kernel that reads the table


def launches(lists: Sequence[Sequence[Tensor]]) -> Iterator[Launch]:
    """Divide tensors into launches.

    The i-th tensors of all lists belong together and have the same size; empty ones are left out. Each launch has one
    data type per list. Its tensors are ALIGNED if all of them may be read 16 elements at a time.
    """
    parts: dict[tuple[object, ...], list[int]] = {}
    for number, tensors in enumerate(zip(*lists, strict=True)):
        if tensors[0].numel():
            is_aligned = all(tensor.data_ptr() % 16 == 0 and tensor.numel() % 16 == 0 for tensor in tensors)
            parts.setdefault((*(tensor.dtype for tensor in tensors), is_aligned), []).append(number)
    for (*_, is_aligned), numbers in parts.items():
        chosen = [[some[number] for number in numbers] for some in lists]
        types = [tl_dtype(some[0].dtype) for some in chosen]
        options = {"ALIGNED": is_aligned, "STEPS": search_steps(len(numbers)), "CHUNK": CHUNK}
        yield Launch(numbers, chosen, types, *tensor_table(chosen), options)


def check_contiguous(name: str, tensors: Iterable[Tensor]) -> None:
    """Raises ValueError if one of the tensors, which `name` was given, is not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise ValueError(f"{name}: a tensor of shape {shape} is not contiguous; make it so beforehand")


def tensor_table(lists: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
    """The table `[tensors, 2 + lists]` for `find`, int64 on the tensors' device, and the number of programs to launch.

    Row i describes the i-th tensors of all lists, which are contiguous: first program, number of elements, addresses.
    """
    rows, programs = [], 0
    for tensors in zip(*lists, strict=True):
        size = tensors[0].numel()
        rows.append([programs, size, *(tensor.data_ptr() for tensor in tensors)])
        programs += -(-size // CHUNK)
    return numbers_on(lists[0][0].device, rows), programs


def numbers_on(device: torch.device, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """`numbers` as int64 on a device. A GPU gets them from pinned memory, so that the host does not wait for it."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def search_steps(tensors: int) -> int:
    """Return the number of times `find` halves the tensors. Few numbers occur, as each needs a kernel of its own."""
    return max(power_of_2(tensors).bit_length() - 1, 8)


@jit
def find(Table, tensors, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    """The index of this program's tensor: the last tensor whose first program is not after this program."""
    low, high = 0, tensors - 1
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        begins = tl.load(Table + middle * COLUMNS) <= tl.program_id(0)
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    return low


@jit
def size_of(Table, row, ALIGNED: tl.constexpr):
    size = tl.load(Table + row + 1)
    return tl.multiple_of(size, 16) if ALIGNED else size


@jit
def pointer(Table, at, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    found = tl.load(Table + at).to(tl.pointer_type(TYPE))
    return tl.multiple_of(found, 16) if ALIGNED else found


def tl_dtype(dtype: torch.dtype) -> object:
    return getattr(tl, str(dtype).removeprefix("torch."))
