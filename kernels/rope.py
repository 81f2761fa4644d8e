"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-rotation form.

Feature i turns together with feature i + e/2, as in Hugging Face's Llama weights.
"""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of x `[s, b, h, e]` by their positions' angles; cos, sin `[s, e/2]`, maybe wider. Out of place."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
