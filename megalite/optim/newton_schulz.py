"""Orthogonalizing a matrix by Newton–Schulz, for Muon (Jordan 2024, kellerjordan.github.io/posts/muon)."""

import math

import torch
from torch import Tensor

from megalite_kernels import symmetric_product
from megalite_kernels.backend import Backend
from megalite_kernels.products import addmm, matmul
from megalite_kernels.symmetric_product import runs_in_kernel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: singular values approach 1 fast, and stay within 0.5 to 1.5
EPS = 1e-7  # the least norm to divide by, as in torch.optim.Muon
SCALES = ("match_rms_adamw", "spectral")


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    backend: Backend = "auto",
) -> Tensor:
    """Approximately U Vᵀ, for a matrix U S Vᵀ `[rows, columns]`, with its shape and data type.

    All is computed in that data type. The matrix is first divided by ‖matrix‖_F, which makes singular values at most 1.
    Every step then replaces each singular value s by a·s + b·s³ + c·s⁵. The first division makes a new tensor. So all
    products see the same alignment, and the bits of the result do not depend on the buffer that holds the matrix.

    backend: what computes the two products of a step that are symmetric, see `megalite_kernels.symmetric_product`.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    halves = runs_in_kernel(x.shape[0], x.dtype, x.device, backend)
    for _ in range(steps):
        if halves:
            gram = symmetric_product(x, backend=backend)
            gram = symmetric_product(gram, gram, alpha=c, beta=b, backend=backend)
        else:
            gram = matmul(x, x.T)
            gram = addmm(gram, gram, gram, beta=b, alpha=c)
        x = addmm(x, gram, x, beta=a)
    return x.T if tall else x


def working_dtype(param: Tensor, device: torch.device) -> torch.dtype:
    """The data type in which the update of `param` is sent and orthogonalized on a device.

    bfloat16 is enough for training (Jordan 2024) and fast on a GPU.
    """
    if param.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def scale(rule: str, rows: int, columns: int) -> float:
    """The factor by which the learning rate is multiplied for a matrix `[rows, columns]`.

    match_rms_adamw: 0.2·√max(rows, columns). An update then is about as large as one of AdamW, so that AdamW's learning
    rate and weight decay carry over (Moonlight: Liu et al. 2025, arXiv 2502.16982, §2.2). spectral: Jordan's
    √max(1, rows/columns).
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
