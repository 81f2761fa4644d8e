"""Choice of the implementation that runs an operation: Triton's kernels, or PyTorch's own operations.

| backend  | CUDA tensor                          | any other tensor | any tensor, under TRITON_INTERPRET=1 |
|----------|--------------------------------------|------------------|--------------------------------------|
| `auto`   | Triton, or PyTorch without Triton    | PyTorch          | PyTorch                              |
| `triton` | Triton, or an error if there is none | an error         | Triton's interpreter, which is slow  |
| `torch`  | PyTorch                              | PyTorch          | PyTorch                              |

Norms and AdamW have a fourth backend, `apex`: see that file.

Kernels are defined when this package is imported, on any machine, and compiled at their first launch. No code here
needs a device before that.
"""

import os
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# The default of Triton up to 3.9, which 3.10 will change: products are added in one rounding where hardware can.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)  # enough to define kernels that are never launched

Backend = Literal["auto", "triton", "torch"]

HAS_TRITON = triton is not None
USES_INTERPRETER = HAS_TRITON and triton.knobs.runtime.interpret  # fixed when Triton is imported


TRITON_INSTALL = "pip install 'triton>=3.6,<3.10'"  # the versions of pyproject.toml
MIN_TILE = 256  # columns: a load of 16 bytes by each thread of a warp, in 16 bits


class Program(NamedTuple):
    """The size of a kernel's programs. Launch functions choose it, unless they are given one."""

    elements: int  # elements of a program's block, a power of 2
    warps: int


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`. Without Triton, the unchanged function, which must not be called."""
    return triton.jit(function) if HAS_TRITON else function


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `launch`: the device of its first tensor is made the current one, since Triton launches there."""

    @wraps(launch)
    def launch_there(*args: Any, **kwargs: Any) -> Any:
        first = args[0]
        while not isinstance(first, Tensor):
            first = first[0]
        with torch.cuda.device_of(first):
            return launch(*args, **kwargs)

    return launch_there


def times(x: Tensor, factor: Tensor | float) -> Tensor:
    """x · factor, computed in place, in the memory of x. No other code may use x.

    While a graph is traced, it is not computed in place. In-place operations return an alias of their tensor, and if an
    autograd function returns such an alias, torch 2.11 traces gradients that are zero. Compiled code reuses the memory
    anyway.
    """
    return x * factor if torch.compiler.is_compiling() else x.mul_(factor)


def use_triton(backend: Backend, device: torch.device) -> bool:
    """Return whether Triton runs for tensors on `device`; see above. Raises ValueError if `backend` cannot run."""
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"{backend!r} is no backend; choose auto, triton or torch")
    if backend == "auto":
        return HAS_TRITON and not USES_INTERPRETER and device.type == "cuda"
    if backend == "torch":
        return False
    if not HAS_TRITON:
        raise ValueError(f"triton is asked for but not installed; on Linux: {TRITON_INSTALL}, or choose auto")
    if device.type not in ("cuda", "meta") and not USES_INTERPRETER:
        raise ValueError(
            f"triton is asked for, but tensors are on {device.type}; move them to cuda, choose auto, "
            "or set TRITON_INTERPRET=1 before Triton is imported to run kernels, slowly, in its interpreter"
        )
    return True


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; a small number on other devices, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; on devices other than CUDA, those of sm_80."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return 163 * 1024


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which kernels compute: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def as_rows(x: Tensor) -> Tensor:
    """`[…, d]` as `[n, d]`, each row of which is contiguous: a view if possible, otherwise a copy."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def power_of_2(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


def row_block(width: int, program: Program) -> dict[str, int]:
    """The block of a program: rows, and as many columns as fill tiles of rows of `width`, but for part of the last."""
    tile = min(power_of_2(width), max(width & -width, MIN_TILE), program.elements)
    return {"ROWS": program.elements // tile, "TILE": tile, "num_warps": program.warps}


@jit
def widen(x):
    """Widen to float32; float64 stays. Applied to every load, since Triton's interpreter is wrong for bfloat16."""
    wide: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return x.to(wide)


@jit
def exp(x):
    """eˣ, but 0 if eˣ is subnormal. `tl.exp` is right for subnormal results too, at the cost of three instructions."""
    return tl.exp2(x * 1.4426950408889634)
