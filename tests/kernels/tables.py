"""Tables of tensors larger than memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite_kernels.tensor_table import CHUNK, tensor_table

BEFORE = 2**31  # elements


def table_of_the_end(lists: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
    """As `tensor_table`, for one tensor that 2³¹ elements, which no program is launched for, are said to precede."""
    table, programs = tensor_table(lists)
    addresses = [-BEFORE * tensor.itemsize for (tensor,) in lists]
    return table + torch.tensor([-BEFORE // CHUNK, BEFORE, *addresses], device=table.device), programs
