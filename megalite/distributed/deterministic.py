"""`train.deterministic`: the same run gives the same bits, also on a GPU."""

import os

import torch

from megalite.base.errors import InputError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS promises to repeat itself; the first is the faster
SWITCHES = "NCCL_NVLS_ENABLE"
ALGORITHMS = "NCCL_ALGO"


def be_deterministic() -> None:
    """Make PyTorch, cuBLAS and NCCL add up in a fixed order. Call this before any of them is used.

    Afterwards, an operation that cannot be deterministic raises RuntimeError. Raises InputError where an environment
    variable contradicts.
    """
    _set(CUBLAS, WORKSPACES)
    _set(SWITCHES, ("0",))  # switches with NVLink SHARP add up in the order in which numbers arrive
    algorithms = os.environ.get(ALGORITHMS, "")
    if "NVLS" in algorithms.upper() and not algorithms.startswith("^"):
        raise _contradiction(ALGORITHMS, "unset it, or leave NVLS out")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over new memory
    torch.backends.cudnn.benchmark = False


def _set(name: str, values: tuple[str, ...]) -> None:
    if os.environ.setdefault(name, values[0]) not in values:
        raise _contradiction(name, f"unset it, or use {' or '.join(values)}")


def _contradiction(name: str, fix: str) -> InputError:
    return InputError(f"train.deterministic = true: {name}={os.environ[name]} in the environment contradicts it; {fix}")
