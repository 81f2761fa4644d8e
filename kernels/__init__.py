"""The hot operations of a decoder, one file each, as Triton kernels and in plain PyTorch.

This package needs only torch, and uses Triton if it is installed. Any operation can be imported without the rest of
megalite. `backend` explains which of the two implementations runs.
"""

from megalite_kernels.adamw import FusedAdamW, adamw, fastest_adamw, fused_adamw
from megalite_kernels.add_rms_norm import add_rms_norm
from megalite_kernels.cross_entropy import cross_entropy
from megalite_kernels.grad_norm import grad_norm
from megalite_kernels.linear_cross_entropy import linear_cross_entropy, scaled_linear_cross_entropy
from megalite_kernels.muon import muon_momentum, muon_update
from megalite_kernels.nf4 import dequantize_nf4, quantize_nf4
from megalite_kernels.qk_norm_rope import qk_norm_rope
from megalite_kernels.rms_norm import rms_norm
from megalite_kernels.rope import rope
from megalite_kernels.rope_of_parts import rope_of_joint, rope_of_parts
from megalite_kernels.routed_rows import collect_rows, spread_rows
from megalite_kernels.swiglu import swiglu, swiglu_of_halves
from megalite_kernels.symmetric_product import symmetric_product
from megalite_kernels.weighted_swiglu import weighted_swiglu

__all__ = [
    "FusedAdamW",
    "adamw",
    "add_rms_norm",
    "collect_rows",
    "cross_entropy",
    "dequantize_nf4",
    "fastest_adamw",
    "fused_adamw",
    "grad_norm",
    "linear_cross_entropy",
    "muon_momentum",
    "muon_update",
    "qk_norm_rope",
    "quantize_nf4",
    "rms_norm",
    "rope",
    "rope_of_joint",
    "rope_of_parts",
    "scaled_linear_cross_entropy",
    "spread_rows",
    "swiglu",
    "swiglu_of_halves",
    "symmetric_product",
    "weighted_swiglu",
]
