"""Calls that the host makes per layer and training step: exact, whatever else the machine does.

A step of a tiny model on one CPU rank is run under `sys.setprofile`, which sees every call of a function in Python or
C, but not what PyTorch calls in C++. The difference between a deep and a shallow model is that of their layers, and
what a step does once cancels out.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.data.loader import Micros
from megalite.distributed.mesh import Mesh
from megalite.plan.resolved import resolve
from megalite.train import build as build_module
from megalite.train.build import build
from megalite.train.step import train_step
from megalite_kernels import products
from megalite_tools.bench.plain import Plain, plain_step

SETTINGS = (
    "model.width=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128", "model.vocab_size=256",
    "model.sequence_length=32", "batch.micro=1", "batch.global=1", "schedule.name=constant",
)  # fmt: skip
SHALLOW, DEEP = 4, 12  # layers
WARM_STEPS = 2  # which make states and buffers that later steps find
# PyTorch compares keys of its caches where their hashes fall together, which depends on addresses.
COMPARISONS = ("__eq__", "_check_equals")
PACKAGES = ("megalite", "megalite_kernels", "megalite_tools")


class _Captured:
    """Takes the place of CUDA graphs: what was captured is launched by one call, which does nothing here."""

    def warming_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


def calls_per_layer(precision: Literal["fp32", "bf16"], graphs: bool = False) -> Counter[str]:
    """Calls of a step per layer, by the innermost function of ours from which they came. Needs a process group.

    graphs: with `train.cuda_graph`.
    """
    settings = f"train.precision={precision}", f"train.cuda_graph={graphs}"
    with patch.object(build_module, "captures_on", lambda device: _Captured()):
        return _per_layer(lambda layers: _step(layers, *settings))


def plain_calls_per_layer() -> Counter[str]:
    """Calls of a step per layer of `Plain`, the same model in float32 as modules of PyTorch, with its fused AdamW."""
    return _per_layer(_plain_step)


def _per_layer(step: Callable[[int], Callable[[], Any]]) -> Counter[str]:
    with patch.object(products, "PREFERS_ONEDNN", False):  # the same on every processor
        deep, shallow = _counted(step(DEEP)), _counted(step(SHALLOW))
    deep.subtract(shallow)
    return Counter({origin: calls // (DEEP - SHALLOW) for origin, calls in deep.items() if calls >= DEEP - SHALLOW})


def _step(layers: int, *settings: str) -> Callable[[], Any]:
    config = check(load(["small_60m"], [*SETTINGS, f"model.layers={layers}", *settings]), 1)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    job = build(resolve(config), mesh)
    batch = Micros.cut_at(_tokens()[None], None)
    return lambda: train_step(job, batch, 0).read()


def _plain_step(layers: int) -> Callable[[], Any]:
    config = load(["small_60m"], [*SETTINGS, f"model.layers={layers}"])
    model = Plain(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return lambda: plain_step(model, optimizer, _tokens(), config.optim.clip_norm)


def _tokens() -> Tensor:
    return torch.arange(33)[None]  # one sequence and the last target


def _counted(step: Callable[[], Any]) -> Counter[str]:
    """Calls of one warm step, by where they came from."""
    for _ in range(WARM_STEPS):
        step()
    found, named = Counter[str](), dict[CodeType, str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_name not in COMPARISONS:
            found[_origin(frame, named)] += 1

    gc.collect()  # before, for else it would run at some time in between, and call finalizers
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def _origin(frame: FrameType | None, named: dict[CodeType, str]) -> str:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in PACKAGES:
            return f"{name}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "PyTorch"
