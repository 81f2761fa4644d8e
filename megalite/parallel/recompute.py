"""Activation recomputation: less is kept for backward, which runs some of forward again.

Full keeps the layer's input alone (Chen et al. 2016, arXiv 1604.06174). Selective keeps what is costly to compute
(Korthikanti et al. 2022, arXiv 2205.05198, §5): where backward would need the result of a `Cheap` function, its
inputs are kept instead, which backward needs anyway, and the function runs again, alone. So no collective does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megalite.parallel.offload import AsIs, Keep, Keeping, elsewhere, keep, storage_of
from megalite.plan.recompute_modes import MODES, Cost, Mode

REPEATS = 5  # of a timed layer


class Cheap(nn.Module):
    """A function as a layer of its own: one result, made from tensors that backward needs as well, in little time."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.call: _Call | None = None  # of the layer around it, where that recomputes

    def forward(self, *inputs: Any) -> Tensor:
        return self.remember(self.function(*inputs), *inputs)

    def remember(self, result: Tensor, *inputs: Any) -> Tensor:
        """Take `result`, however it came about, for what the function makes of `inputs`."""
        if self.call is not None:
            self.call.made(result, self.function, inputs)
        return result


def recompute(layer: nn.Module, mode: Mode, keeping: Keeping = AsIs) -> None:
    """Let backward run `layer` again as `mode` says, in place; what is kept is kept as `keeping` says.

    The first input of `layer` is its activation. Call it before FSDP2 wraps the layer.
    """
    forward = layer.forward
    match mode:
        case "selective":
            cheap = [module for module in layer.modules() if isinstance(module, Cheap)]
            layer.forward = partial(_selective, forward, layer, cheap, keeping)
            return
        case "full":
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    layer.forward = forward if keeping is AsIs else partial(keep, forward, layer, keeping)


def _selective(
    forward: Callable[..., Tensor], layer: nn.Module, cheap: Sequence[Cheap], keeping: Keeping, *inputs: Any
) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    call = _Call(keeping(layer, inputs))
    for module in cheap:
        module.call = call
    try:
        with saved_tensors_hooks(call.pack, call.unpack):
            return forward(*inputs)
    finally:
        call.recipes.clear()  # those that no saved tensor needs end here
        for module in cheap:
            module.call = None


@dataclass(frozen=True)
class _Recipe:
    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    packed: tuple[bool, ...]  # which inputs are


@dataclass(frozen=True)
class _Again:
    """A saved tensor that is a view of what `recipe` makes."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Call:
    """One call of a layer whose cheap results are made again."""

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


def measure(run: Callable[[], Tensor], layer: nn.Module) -> dict[Mode, Cost]:
    """What `run`, a forward pass through `layer`, and its backward pass cost in every mode.

    The modes take turns, and the best of their times counts: whatever else the machine does slows all of them.
    """
    bytes_kept: dict[Mode, int] = {}
    seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for _ in range(1 + REPEATS):
        for mode in MODES:
            counted = Counted()
            recompute(layer, mode, counted)
            seconds[mode].append(_seconds(run, layer))
            bytes_kept[mode] = counted.bytes
            del layer.forward  # the wrapper: below it is the class's
    return {mode: Cost(min(seconds[mode][1:]), bytes_kept[mode]) for mode in MODES}  # the first pass warms up


def _seconds(run: Callable[[], Tensor], layer: nn.Module) -> float:
    began = _now()
    result = run()
    result.backward(torch.ones_like(result))
    seconds = _now() - began
    for param in layer.parameters():
        param.grad = None
    return seconds


def _now() -> float:
    """The time when everything launched so far is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
