"""The kernels of attention that a run takes on its device: chosen by the table, and each tried before training."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from megalite.base.errors import InputError, Problem
from megalite.config.attention_kernels import Choice, Kernel, Machine, Need, attention_heads, choose, need_of
from megalite.config.layers import Heads, Scores
from megalite.config.schema import AttentionKernel, Config
from megalite.parallel.context import attention

MODULES: Mapping[Kernel, str] = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute.interface"}
IMPLEMENTATIONS: Mapping[Kernel, str] = {"flash3": "FA3", "flash4": "FA4"}  # PyTorch's names for them
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
TRIED_LENGTH = 256


def attention_kernels(config: Config, device: torch.device) -> dict[Scores, Choice]:
    """The kernel of every kind of attention of `config` on `device`.

    FlashAttention of a package, where it is chosen, is made what PyTorch calls. Raises InputError where the kernel that
    is asked for cannot be used.
    """
    asked, tp = config.kernels_by_operation.attention, config.parallel.tp
    kinds = attention_heads(config)
    local = (replace(heads, count=heads.count // tp, kv_count=heads.kv_count // tp) for heads in kinds)
    needs = tuple((need_of(config, heads), heads) for heads in local)
    try:
        choices = settled(asked, needs, device)
    except ValueError as error:
        fix = "use auto, which takes the first of its table that runs"
        raise InputError([Problem("kernels.attention", str(error), fix, asked)]) from None
    return {heads.scores: choice for heads, choice in zip(kinds, choices, strict=True)}


@cache
def settled(asked: AttentionKernel, needs: tuple[tuple[Need, Heads], ...], device: torch.device) -> tuple[Choice, ...]:
    """The first kernel of the table that runs on the device, for each need. Raises ValueError.

    One that does not run for one of them is used for none, since PyTorch has one FlashAttention at a time.
    """
    gpu = machine(device)
    while True:
        choices = tuple(choose(asked, need, gpu) for need, _ in needs)
        refused = {} if gpu is None else _refused(choices, needs, device)
        if gpu is None or not refused:
            return choices
        gpu = replace(gpu, refused={**gpu.refused, **refused})


def machine(device: torch.device) -> Machine | None:
    """The facts that the table asks of `device`; None for a CPU."""
    if device.type != "cuda":
        return None
    packages = frozenset(kernel for kernel, module in MODULES.items() if _importable(module))
    cudnn, refused = 0, dict[Kernel, str]()
    try:
        cudnn = 0 if torch.version.hip else torch.backends.cudnn.version() or 0
    except RuntimeError as error:  # an older cuDNN stands in the way of PyTorch's own, as in LD_LIBRARY_PATH
        refused["cudnn"] = _told(error)
    return Machine(torch.cuda.get_device_capability(device), packages, cudnn, refused)


def _told(error: Exception) -> str:
    """The first line of an error."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is not there, or broken
        return False


def _refused(choices: Iterable[Choice], needs: Iterable[tuple[Need, Heads]], device: torch.device) -> dict[Kernel, str]:
    """The kernels that do not run, and what they say."""
    found: dict[Kernel, str] = {}
    restore_flash_attention_impl(_raise_warn=False)
    for (kernel, _), (need, heads) in zip(choices, needs, strict=True):
        if kernel == "math":  # the last of the table
            continue
        try:
            if kernel in IMPLEMENTATIONS and current_flash_attention_impl() is None:
                activate_flash_attention_impl(IMPLEMENTATIONS[kernel])
            _try(kernel, need, heads, device)
        except (ImportError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            found[kernel] = _told(error)
    return found


def _try(kernel: Kernel, need: Need, heads: Heads, device: torch.device) -> None:
    """Run `kernel` on a few tokens, forward and backward."""
    length, dtype = TRIED_LENGTH, DTYPES[need.precision]
    scores = replace(heads.scores, window=length // 2 if need.window else None)
    documents = [(0, length)] if need.documents or need.ring else None
    shapes = (heads.count, heads.width), (heads.kv_count, heads.width), (heads.kv_count, heads.value_width)
    given = [torch.ones(length, 1, *shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    if scores.sinks:
        given.append(torch.ones(heads.count, dtype=dtype, device=device, requires_grad=True))
    attention("ring", None, length, device, documents, scores, kernel)(*given).sum().backward()
    torch.cuda.synchronize(device)
