"""The hot operations of a decoder, each in a file of its own, in plain PyTorch.

Stands on torch alone: import one operation without the rest of megalite.
"""

from megalite_kernels.cross_entropy import cross_entropy
from megalite_kernels.rms_norm import rms_norm
from megalite_kernels.rope import rope
from megalite_kernels.swiglu import swiglu

__all__ = ["cross_entropy", "rms_norm", "rope", "swiglu"]
