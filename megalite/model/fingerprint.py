"""A number that tells a model's weights from others, the same in every layout: each rank adds up those of its parts."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megalite.parallel.hashes import splitmix, start_of

BLOCK = 1 << 20  # elements at a time
MODULUS = 1 << 64


@torch.no_grad()
def fingerprint(name: str, part: Tensor, shape: Sequence[int], offset: Sequence[int], first: int = 0) -> int:
    """The number, modulo 2⁶⁴, of the box `part` at `offset` of a tensor of `shape`. Boxes of a tensor add up to it.

    It is a sum over all elements: the bits of the value in bf16, times a hash of the element's place. So it is the same
    in every precision, and finds weights that were mistaken for others, not those that somebody has made to have the
    same number. first: the index of the tensor's first element, if it is one of a stack.
    """
    if part.ndim > 2:
        inner = ((first + number * prod(shape[1:]), each) for number, each in enumerate(part, offset[0]))
        return sum(fingerprint(name, each, shape[1:], offset[1:], begin) for begin, each in inner) % MODULUS
    if part.ndim == 1:
        return fingerprint(name, part[None], (1, *shape), (0, *offset), first)
    if part.numel() == 0:
        return 0
    start = start_of(name)
    rows, columns = part.shape
    across = torch.arange(columns, device=part.device) + offset[1]
    total, step = 0, max(1, BLOCK // columns)
    for top in range(0, rows, step):
        block = part[top : top + step].bfloat16().contiguous()
        down = torch.arange(top, top + len(block), device=part.device) + offset[0]
        places = splitmix(start, first + down[:, None] * shape[1] + across)
        total += int((block.view(torch.int16).long() * places).sum())
    return total % MODULUS
