"""A number that tells a model's weights from others, the same in every layout: each rank adds up those of its parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.parallel.hashes import splitmix, start_of

BLOCK = 1 << 22  # elements at a time
MODULUS = 1 << 64


@torch.no_grad()
def fingerprint(name: str, part: Tensor, shape: Sequence[int], offset: Sequence[int]) -> int:
    """The number, modulo 2⁶⁴, of the box `part` at `offset` of a tensor of `shape`. Boxes of a tensor add up to it.

    It is a sum over all elements: the bits of the value in bf16, times a hash of the element's row and one of its
    column. So it is the same in every precision, and finds weights that were mistaken for others, not those that
    somebody has made to have the same number.
    """
    if part.ndim == 1:
        return fingerprint(name, part[None], (1, *shape), (0, *offset))
    if part.numel() == 0:
        return 0
    *leading, columns = part.shape
    across = splitmix(start_of(f"{name}, columns"), torch.arange(columns, device=part.device) + offset[-1])
    numbers = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, first, whole in zip(leading, offset, shape[:-1], strict=False):
        numbers = numbers[..., None] * whole + torch.arange(size, device=part.device) + first
    down, rows = splitmix(start_of(f"{name}, rows"), numbers.flatten()), part.reshape(-1, columns)
    total, step = 0, max(1, BLOCK // columns)
    for top in range(0, len(rows), step):
        block = rows[top : top + step].bfloat16().view(torch.int16).long()
        total += int((block.mul_(across).sum(1) * down[top : top + step]).sum())
    return total % MODULUS
