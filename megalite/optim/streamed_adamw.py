"""AdamW on the device whose states live elsewhere and pass through it bucket by bucket.

The arithmetic is that of AdamW with its states on the device, so the bits are the same: an update of a part of a tensor
is that part of the tensor's update. No copies of weights or gradients are needed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.optim.states import FileStates, HostStates, local
from megalite.optim.streams import Bucket
from megalite.plan.model.optimizer_states import ADAMW_STATES
from megalite.plan.state_streams import BLOCK, padded
from megalite_kernels import FusedAdamW


@dataclass(frozen=True)
class _Part:
    """Elements of a parameter's part on this rank. last: they are its last, so the number of updates may rise."""

    param: Tensor
    elements: slice
    last: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor that is placed like the parameter, flat."""
        return local(tensor).detach().view(-1)[self.elements]


class StreamedAdamW(FusedAdamW):
    """`FusedAdamW` with moments of `states`, whose update runs on the device of the parameters.

    parameters: the store of parameters and gradients in host memory, which pass through its device likewise.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: HostStates | FileStates,
        update: Callable[..., None],
        copy_of: Callable[[Tensor], Tensor | None] = lambda _: None,
        parameters: HostStates | None = None,
    ) -> None:
        super().__init__(groups, lr, betas, eps, 0, update, states.zeros, copy_of)
        self.states, self.parameters = states, parameters

    def states_of(self, param: Tensor) -> dict[str, Tensor]:
        """The moments and the number of updates of a parameter. Waits for a step that is writing them."""
        self.states.settle()
        return super().states_of(param)

    def runs_on(self, param: Tensor) -> torch.device:
        return self.states.updates_on(param)

    def buffers(self) -> list[Tensor]:
        """Host memory that moments pass through."""
        return [*self.states.buffers()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, with as many buckets as their moments need."""
        buckets = [(group, parts) for group in self.param_groups for parts in self._buckets(group["params"])]
        if not buckets:
            return
        moments = [
            [part.of(self.state[part.param][name]) for name in ADAMW_STATES for part in parts] for _, parts in buckets
        ]
        device = self.runs_on(buckets[0][1][0].param)
        pairs: Iterator[Bucket] = (_weights_and_gradients(parts) for _, parts in buckets)
        if self.parameters is not None:
            pairs = self.parameters.streamed([*pairs], device)
        for here, pair, (group, parts) in zip(self.states.streamed(moments, device), pairs, buckets, strict=True):
            copies = [part.of(copy) for part in parts if (copy := self.copy_of(part.param)) is not None]
            self.update(
                pair[: len(parts)],
                pair[len(parts) :],
                here[: len(parts)],
                here[len(parts) :],
                [self._count(part) for part in parts],
                lr=float(group["lr"]),
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                clip=self.clip,
                found_inf=self.found_inf,
                **({"copies": copies} if copies else {}),
            )
        if self.parameters is not None:
            self.parameters.settle()  # the host may read weights now, and the next step copies them

    def _count(self, part: _Part) -> Tensor:
        """The number of updates, which an update raises: for all parts of a parameter but the last, a copy of it."""
        count = self.state[part.param]["step"]
        return count if part.last else count.clone()

    def _buckets(self, params: Iterable[Tensor]) -> Iterator[list[_Part]]:
        """Parts of parameters that have gradients, as many at once as a slot has room for the moments of."""
        parts, size = list[_Part](), 0
        for param in params:
            if param.grad is None:
                continue
            moment = local(self.states_of(param)["exp_avg"])
            most = self.states.slot_bytes // len(ADAMW_STATES) // BLOCK * BLOCK // moment.itemsize
            for first in range(0, max(moment.numel(), 1), most):
                part = _Part(param, slice(first, first + most), last=first + most >= moment.numel())
                more = len(ADAMW_STATES) * padded(len(part.of(moment)) * moment.itemsize)
                if parts and size + more > self.states.slot_bytes:
                    yield parts
                    parts, size = [], 0
                parts.append(part)
                size += more
        if parts:
            yield parts


def _weights_and_gradients(parts: Sequence[_Part]) -> list[Tensor]:
    """The weights of some parts, then their gradients."""
    grads = [part.of(part.param.grad.contiguous()) for part in parts if part.param.grad is not None]
    return [*(part.of(part.param) for part in parts), *grads]
