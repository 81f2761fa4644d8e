"""Activation recomputation: forward saves fewer tensors, and backward runs parts of forward again.

Mode full saves only the layer's input (Chen et al. 2016, arXiv 1604.06174). Mode selective saves results that are
costly to compute (Korthikanti et al. 2022, arXiv 2205.05198, §5). The result of a `Cheap` function is not saved.
Its inputs are saved instead, which backward needs anyway, and backward runs that function again. No collective runs
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megalite.parallel.offload import AsIs, Keep, Keeping, elsewhere, keep, storage_of
from megalite.plan.recompute_modes import MODES, Mode, ModeCost

T = TypeVar("T")
REPEATS = 5  # timed passes through a layer, per mode


class Cheap(nn.Module):
    """A cheap function as a module: it quickly computes one result from tensors that backward needs as well."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.call: _Call | None = None  # the call of the layer around it, if that recomputes

    def forward(self, *inputs: Any) -> Tensor:
        return self.remember(self.function(*inputs), *inputs)

    def remember(self, result: Tensor, *inputs: Any) -> Tensor:
        """Note that `result` is what the function computes from `inputs`, even if other code has computed it."""
        if self.call is not None:
            self.call.made(result, self.function, inputs)
        return result


class _Memory:
    """Results of `remembered` in one call of a layer with full recompute, for the pass that runs it again."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.again = False

    @contextmanager
    def running(self, again: bool) -> Iterator[None]:
        before, self.again = _running.memory, again
        _running.memory = self
        try:
            yield
        finally:
            _running.memory = before


class _Running(threading.local):
    memory: _Memory | None = None  # the layer that a thread runs has it; forward and backward may take turns


_running = _Running()


def remembered(make: Callable[[], T]) -> T:
    """Return `make()`, which full recompute does not call again: rounding could change a choice that it makes.

    A layer must call this equally often in every pass.
    """
    memory = _running.memory
    if memory is None:
        return make()
    if memory.again:
        return cast(T, memory.made.pop(0))
    memory.made.append(made := make())
    return made


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    memory = _Memory()
    return memory.running(again=False), memory.running(again=True)


def recompute(layer: nn.Module, mode: Mode, keeping: Keeping = AsIs) -> None:
    """Change `layer`, in place, to recompute as `mode` says. The tensors that it saves are stored by `keeping`.

    The first input of `layer` is its activation. Call it before FSDP2 wraps the layer.
    """
    forward = layer.forward
    match mode:
        case "selective":
            cheap = [module for module in layer.modules() if isinstance(module, Cheap)]
            layer.forward = partial(_selective, forward, layer, cheap, keeping)
            return
        case "full":
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)
    layer.forward = forward if keeping is AsIs else partial(keep, forward, layer, keeping)


def _selective(
    forward: Callable[..., Any], layer: nn.Module, cheap: Sequence[Cheap], keeping: Keeping, *inputs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    call = _Call(keeping(layer, inputs))
    for module in cheap:
        module.call = call
    try:
        with saved_tensors_hooks(call.pack, call.unpack):
            return forward(*inputs)
    finally:
        call.recipes.clear()  # frees the recipes that no saved tensor needs
        for module in cheap:
            module.call = None


@dataclass(frozen=True)
class _Recipe:
    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    packed: tuple[bool, ...]  # whether each input is packed


@dataclass(frozen=True)
class _Again:
    """A saved tensor that is a view of the result of `recipe`."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Call:
    """One call of a layer whose cheap results backward computes again."""

    def __init__(self, kept: Keep) -> None:
        self.kept = kept
        self.recipes: dict[StorageWeakRef, _Recipe] = {}

    def made(self, result: Tensor, function: Callable[..., Tensor], inputs: Sequence[Any]) -> None:
        tensors = tuple(isinstance(x, Tensor) for x in inputs)
        packed = (self.pack(x.detach()) if is_tensor else x for x, is_tensor in zip(inputs, tensors, strict=True))
        self.recipes[storage_of(result)] = _Recipe(function, tuple(packed), tensors)

    def pack(self, tensor: Tensor) -> Any:
        recipe = self.recipes.get(storage_of(tensor))
        if recipe is None:
            return self.kept.pack(tensor)
        return _Again(recipe, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Again):
            return self.kept.unpack(packed)
        recipe = packed.recipe
        inputs = (self.unpack(x) if is_packed else x for x, is_packed in zip(recipe.inputs, recipe.packed, strict=True))
        with torch.no_grad():
            return recipe.function(*inputs).as_strided(packed.size, packed.stride, packed.offset)


class Counted:
    """A `Keeping` that keeps tensors where they are and counts the bytes that the latest call saves."""

    def __init__(self) -> None:
        self._kept: dict[StorageWeakRef, int] = {}
        self._stays: set[StorageWeakRef] = set()

    def __call__(self, layer: nn.Module, inputs: Sequence[Any]) -> Keep:
        self._kept, self._stays = {}, elsewhere(layer, inputs)
        return self

    @property
    def bytes(self) -> int:
        return sum(self._kept.values())

    def pack(self, tensor: Tensor) -> Any:
        if (storage := storage_of(tensor)) not in self._stays:
            self._kept[storage] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        return packed


def measure(run: Callable[[], Tensor], layer: nn.Module) -> dict[Mode, ModeCost]:
    """Measure for every mode the time of `run`, a forward pass through `layer`, with its backward, and the bytes saved.

    The modes take turns, so that other load on the machine slows all of them, and the shortest time of each counts.
    """
    bytes_kept: dict[Mode, int] = {}
    seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for _ in range(1 + REPEATS):
        for mode in MODES:
            counted = Counted()
            recompute(layer, mode, counted)
            seconds[mode].append(_seconds(run, layer))
            bytes_kept[mode] = counted.bytes
            del layer.forward  # removes the wrapper, so that the method of the class is called again
    return {mode: ModeCost(min(seconds[mode][1:]), bytes_kept[mode]) for mode in MODES}  # the first pass warms up


def _seconds(run: Callable[[], Tensor], layer: nn.Module) -> float:
    began = _now()
    result = run()
    result.backward(torch.ones_like(result))
    seconds = _now() - began
    for param in layer.parameters():
        param.grad = None
    return seconds


def _now() -> float:
    """The time, once everything launched so far is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
