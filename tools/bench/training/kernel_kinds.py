"""Kinds of kernels, found by their names, and the time that each kind takes. Imports no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = (  # the first pattern that is found decides
    ("communication", r"nccl|c10d::|gloo"),
    ("copy", r"memcpy|memset|aten::copy_|aten::_to_copy|CopyFunctor"),
    ("attention", r"flash|fmha|sdpa|attention|_fwd_kernel_|mha_"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|_squares_kernel|_fused_adamw_"),
    ("loss", r"cross_entropy|nll_loss|softmax|_stats_kernel|_merge_kernel|_gradient_kernel"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitk|aten::(add)?mm\b|aten::linear|aten::_scaled_mm"),
    ("norm", r"rms_?norm|layer_?norm"),
    ("rope", r"rope|rotary"),
    ("swiglu", r"swiglu|silu"),
    ("embedding", r"embedding|indexselect|index_select"),
    ("copy", r"copy|catarray|chunk_cat|split_with_sizes|aten::cat"),
    ("compiled", r"^triton_|cpp_fused"),
    ("pointwise", r"elementwise|vectorized|reduce_kernel|aten::"),
)
PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS]
BACKENDS = (  # attention, by a kernel's name
    ("cudnn", r"cudnn"),
    ("flash3", r"flash3|flash_fwd_sm90|FlashAttnFwdSm90"),
    ("flash2", r"flash"),
    ("efficient", r"fmha|mem_eff|efficient"),
    ("flex", r"triton_tem.*flex|flex_attention"),
)
MAX_LISTED = 24  # kernels of a row, those that take longest
MAX_NAME_LENGTH = 120  # characters of a name
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events that a GPU works in


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in the steps that were profiled."""

    name: str
    count: int
    ms: float


def kind_of(name: str) -> str:
    """The kind of a kernel; `other` if its name fits none."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


def attention_backend(kernels: Iterable[Kernel]) -> str:
    """The implementation of attention that took most time; "" if none ran as a kernel of its own."""
    found: dict[str, float] = {}
    for kernel in kernels:
        for backend, pattern in BACKENDS:
            if kind_of(kernel.name) == "attention" and re.search(pattern, kernel.name, re.IGNORECASE):
                found[backend] = found.get(backend, 0.0) + kernel.ms
                break
    return max(found, key=lambda backend: found[backend]) if found else ""


def summary(kernels: Sequence[Kernel], steps: int, gap_ms: float | None = None) -> dict[str, Any]:
    """The part of a row that a profile of `steps` steps gives: times per step, by kind and by kernel.

    gap_ms: of all steps, in which the GPU did nothing; None on a CPU.
    """
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        by_kind[kind_of(kernel.name)] = by_kind.get(kind_of(kernel.name), 0.0) + kernel.ms
    if gap_ms is not None:
        by_kind["gap"] = gap_ms
    longest = sorted(kernels, key=lambda kernel: -kernel.ms)[:MAX_LISTED]
    return {
        "kernels_per_step": round(sum(kernel.count for kernel in kernels) / steps, 1),
        "ms_by_kind": {kind: round(ms / steps, 3) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
        "kernels": [
            {"name": kernel.name[:MAX_NAME_LENGTH], "per_step": kernel.count / steps, "ms": round(kernel.ms / steps, 4)}
            for kernel in longest
        ],
        "attention": attention_backend(kernels),
    }


def of_trace(events: Iterable[Mapping[str, Any]]) -> tuple[list[Kernel], float]:
    """The kernels of a Chrome trace, and the milliseconds between first and last in which none ran."""
    told = [event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE]
    counts: dict[str, tuple[int, float]] = {}
    for event in told:
        count, micro = counts.get(event["name"], (0, 0.0))
        counts[event["name"]] = count + 1, micro + event["dur"]
    gap, end = 0.0, None
    for event in sorted(told, key=lambda event: event["ts"]):
        gap += max(0.0, event["ts"] - end) if end is not None else 0.0
        end = max(end or 0.0, event["ts"] + event["dur"])
    return [Kernel(name, count, micro / 1e3) for name, (count, micro) in counts.items()], gap / 1e3
