"""Kinds of work by the names of kernels and operators, and axes by the descriptions of process groups."""

import re

AXES = {  # axis -> descriptions of its process groups, see `Mesh.build`
    "tp": ("mesh_tp",),
    "cp": ("cp",),
    "ep": ("mesh_ep",),
    "pp": ("mesh_pp", "pp_even", "pp_odd", "pp_ends"),
    "dp": ("mesh_fsdp", "mesh_dp_replicate", "mesh_ep_fsdp", "mesh_ep_replicate"),
    "all": ("world", "stage", "default_pg"),
}
OTHER = "other"  # axis of groups that are none of the mesh's
AXIS_OF = {description: axis for axis, descriptions in AXES.items() for description in descriptions}

# Kinds of compute. A moment in which several run counts for the first of them: operators call others of later kinds.
COMPUTE = ("optimizer", "attention", "matmul", "fused", "copy", "pointwise")
# Without \b before \w+, a long name takes time with the square of its length.
COMMUNICATION = re.compile(
    r"ncclDev|ncclKernel|\bnccl[A-Z]\w+Kernel|gloo:"
)  # names of kernels and work that communicate
OPERATORS = re.compile(r"(aten|megalite|mkldnn)::")  # beginnings of operators' names; others may wait for a collective
PATTERNS = (  # parts of names in small letters, by kind; the first that fits counts
    ("optimizer", r"adam|newton_schulz|_momentum_kernel|_update_kernel"),
    ("attention", r"flash|fmha|attention|sdpa|flex_"),
    (
        "matmul",
        r"gemm|cutlass|cublas|nvjet|xmma|\bmm\b|addmm|baddbmm|\bbmm\b|matmul|\blinear\b|linear_pointwise|einsum|dot_kernel|splitk|_symmetric_kernel",
    ),
    ("fused", r"^_\w+$|megalite|triton|rms_?norm|layer_?norm|swiglu|rope|cross_entropy"),
    ("copy", r"memcpy|memset|copy|catarray|\bcat\b|clone|contiguous|_to_copy|fill|zero_|\bstack\b|split_with_sizes"),
)
KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in PATTERNS)


def kind_of(name: str) -> str:
    """The kind of compute of a kernel, or of an operator such as `aten::mm`."""
    small = name.lower()
    return next((kind for kind, pattern in KINDS if pattern.search(small)), "pointwise")


def axis_of(description: str) -> str:
    """The axis of a process group with this description."""
    return AXIS_OF.get(description, OTHER)
