"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-rotation form.

Feature i turns together with feature i + e/2, as in Hugging Face's Llama weights.
"""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of x `[s, b, h, e]` by their positions' angles, out of place.

    cos, sin `[s, b, 1, e/2]`, or `[s, 1, 1, e/2]` where all sequences have the same positions; maybe wider than x.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
