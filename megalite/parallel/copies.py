"""Copies of parameters in the data type of compute, for ranks that have nothing to gather and nothing to reduce.

Parameters stay in float32, as they are initialized, updated and saved. Layers compute with the copies, and gradients
are summed in float32 in the `grad` of the parameters: products of linear layers add theirs there, and what autograd
makes for a copy is added when it is made. So no step moves weights or gradients but for a use of them.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.parallel.parameter import COPY, JOINT, Joint, add_gradient, dtensor, in_four_bits


class Copies:
    """Copies of the parameters of `stage`, which are equal to them whenever a forward pass of `stage` begins.

    A write in place raises the version of a parameter or of its local tensor, whoever writes: an optimizer, or a
    checkpoint that is loaded. The copy is then made again, unless it was written too, as an optimizer does in the pass
    of its update.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype) -> None:
        self.stage, self.dtype = stage, dtype
        self._kept: list[_Kept] = []
        stage.register_forward_pre_hook(self.refresh)

    def __iter__(self) -> Iterator[Tensor]:
        return (kept.copy for kept in self._kept)

    @torch.no_grad()
    def refresh(self, *_: object) -> None:
        """Make the copies that are not equal to their parameters. The arguments of a hook are not used."""
        if not self._kept or self._kept[0].param is not next(self.stage.parameters()):  # `to_empty` makes new ones
            parts = dict(self._joint())
            self._kept = [_Kept(param, self.dtype, parts.get(param)) for param in self.stage.parameters()]
        written, stale = [], []
        for kept in self._kept:
            now = kept.param._version, kept.local._version, kept.copy._version
            if now != kept.seen:
                written.append(kept)
                if now[2] == kept.seen[2]:
                    stale.append(kept)
        if stale:
            torch._foreach_copy_([kept.copy for kept in stale], [kept.local for kept in stale])
        for kept in written:
            kept.seen = kept.param._version, kept.local._version, kept.copy._version

    def _joint(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights and biases of layers that share an input, with the memory of their copies."""
        for module in self.stage.modules():
            layers = [getattr(module, name) for name in getattr(module, "share_input", ())]
            if not layers or in_four_bits(layers[0].weight):
                continue
            weight = yield from self._together([layer.weight for layer in layers])
            has_biases = layers[0].bias is not None
            bias = (yield from self._together([layer.bias for layer in layers])) if has_biases else None
            setattr(layers[0].weight, JOINT, Joint(weight, bias, [len(layer.weight._local_tensor) for layer in layers]))

    def _together(self, params: Sequence[Any]) -> Generator[tuple[nn.Parameter, Tensor], None, Tensor]:
        """Parameters, with parts of one tensor, in which their copies lie one after another. Returns that tensor."""
        parts = [param._local_tensor for param in params]
        rows = list(map(len, parts))
        joint = parts[0].new_empty(sum(rows), *parts[0].shape[1:], dtype=self.dtype)
        for param, part, copy in zip(params, parts, joint.split(rows), strict=True):
            made = copy.data.copy_(part)  # `data` has a version of its own, which a view has not
            if part.dtype == self.dtype:  # the parameter is its own copy
                param.data = dtensor(made, param._spec)  # at the copy's place in its storage, for the compiler
                param._local_tensor = made
            yield param, made
        _take_gradients(joint, params)
        return joint


class _Kept:
    """A parameter, its local tensor and the copy of that, with the versions of the two when they were last equal."""

    def __init__(self, param: nn.Parameter, dtype: torch.dtype, copy: Tensor | None) -> None:
        assert isinstance(param, DTensor)
        self.param, self.local = param, param._local_tensor
        if copy is None:
            copy = self.local.detach().to(self.local.dtype if in_four_bits(param) else dtype)
        self.copy = copy
        self.seen = param._version, self.local._version, self.copy._version
        setattr(param, COPY, self.copy)
        _take_gradients(copy, [param])


def _take_gradients(copy: Tensor, params: Sequence[DTensor]) -> None:
    """Let autograd make the gradient of `copy`, which is handed on to `params`, whose copies lie in it."""
    if any(param.requires_grad for param in params):
        copy.requires_grad_()
        copy.grad_dtype = None  # the head's is a float32 sum
        copy.register_post_accumulate_grad_hook(_handing_on(params))


def _handing_on(params: Sequence[DTensor]) -> Callable[[Tensor], None]:
    """A hook of the copies of `params` that adds the rows of their gradient to those of the parameters."""
    owners, rows = list(map(weakref.ref, params)), [len(param._local_tensor) for param in params]

    def hand_on(copy: Tensor) -> None:
        grad, copy.grad = copy.grad, None
        assert grad is not None
        with torch.no_grad():
            for of, part in zip(owners, grad.split(rows) if len(rows) > 1 else (grad,), strict=True):
                param = of()
                assert param is not None
                if param.requires_grad:
                    add_gradient(param, part)

    return hand_on
