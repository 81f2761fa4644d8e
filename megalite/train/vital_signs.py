"""The vital signs of an optimizer step: a small vector, summed over all ranks by the same all-reduce as the norm."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.stop_signals import STOP_SIGNALS
from megalite.distributed.mesh import Mesh


@dataclass(frozen=True)
class Reading:
    """The vital signs as numbers, the same on every rank."""

    loss: float  # mean per token
    norm: float  # L2 norm of all gradients
    asked: tuple[str, ...]  # signals by which some rank was asked to stop
    load: tuple[int, ...] = ()  # tokens that chose each expert of each layer with experts
    further: tuple[float, ...] = ()  # mean loss of each token further ahead, with multi-token prediction

    @property
    def finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.norm)


class Arriving:
    """Numbers on their way from the device to the host. Neither waits until they are read."""

    def __init__(self, values: Tensor) -> None:
        self.host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        self.host.copy_(values, non_blocking=True)
        self.arrived = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def read(self) -> list[float]:
        """The numbers. Waits until the device has finished earlier work."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[float] = self.host.tolist()
        return found


@dataclass(frozen=True)
class Signs:
    """The vital signs of one step: on the device, and on their way to the host."""

    # float64: square of the norm, loss, for each signal how many ranks were sent it, `further` losses, experts' load
    values: Tensor
    names: list[str]  # parameters whose gradients this rank counts
    norms: Tensor  # L2 norms of its parts of them
    arriving: Arriving  # `values`
    depth: int = 0  # how many `further` losses there are

    @property
    def norm(self) -> Tensor:
        """The L2 norm of all gradients."""
        return self.values[0].sqrt()

    @property
    def loss(self) -> Tensor:
        """The mean loss per token."""
        return self.values[1]

    @property
    def load(self) -> Tensor:
        """Tokens that chose each expert of each layer with experts, one layer after another."""
        return self.values[2 + len(STOP_SIGNALS) + self.depth :]

    @property
    def bad(self) -> Tensor:
        """1 if loss or norm is not finite, else 0. Fused optimizers take this as `found_inf`."""
        return 1 - self.values[:2].isfinite().all().float()

    def read(self) -> Reading:
        """The numbers. Waits until the device has finished the step."""
        square, loss, *rest = self.arriving.read()
        asked, rest = rest[: len(STOP_SIGNALS)], rest[len(STOP_SIGNALS) :]
        further, load = rest[: self.depth], rest[self.depth :]
        return Reading(loss, sqrt(square), _names(asked), tuple(map(int, load)), tuple(further))

    def offending(self) -> list[str]:
        """Parameters whose gradients are not finite on this rank."""
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=True) if not isfinite(norm)]


@dataclass(frozen=True)
class Asked:
    """Signals that have asked some rank to stop, on their way from the device to the host."""

    arriving: Arriving

    def read(self) -> tuple[str, ...]:
        """Return the names of the signals, the same on every rank. Waits until the device has finished earlier work."""
        return _names(self.arriving.read())


def ask_all(mesh: Mesh, asked: Collection[int]) -> Asked:
    """Find out whether any rank was asked to stop; nothing waits for the device.

    asked: signals that this rank has received.
    """
    values = torch.zeros(len(STOP_SIGNALS), dtype=torch.float64, device=mesh.device)
    _mark(values, asked)
    dist.all_reduce(values, group=mesh.world)
    return Asked(Arriving(values))


def left_under_way(mesh: Mesh) -> int:
    """The number of steps whose vital signs the host does not wait for, so that the device always has work."""
    return 1 if mesh.device.type == "cuda" else 0


@torch.no_grad()
def take_signs(
    mesh: Mesh,
    names: list[str],
    norms: Tensor,
    loss: Tensor | None,
    asked: Collection[int],
    load: Tensor | None = None,
    further: Tensor | None = None,
) -> Signs:
    """Sum the vital signs over all ranks; nothing waits for the device.

    loss: this rank's part of the mean loss; None if another rank counts it. asked: signals that this rank has received.
    load: float64, tokens of this rank that chose each expert; None: there are no experts. further: float64, this rank's
    parts of the mean losses of tokens further ahead; None: none are predicted.
    """
    values = torch.zeros(2 + len(STOP_SIGNALS), dtype=torch.float64, device=mesh.device)
    more = [each for each in (further, load) if each is not None]
    values = torch.cat((values, *more)) if more else values
    values[0] += norms.square().sum()
    if loss is not None:
        values[1] += loss
    _mark(values[2 : 2 + len(STOP_SIGNALS)], asked)
    dist.all_reduce(values, group=mesh.world)
    return Signs(values, names, norms, Arriving(values), 0 if further is None else len(further))


def _mark(values: Tensor, asked: Collection[int]) -> None:
    for position, number in enumerate(STOP_SIGNALS):
        if number in asked:
            values[position].fill_(1)  # a kernel with a constant; a copy from the host would wait


def _names(ranks_asked: Iterable[float]) -> tuple[str, ...]:
    return tuple(number.name for number, ranks in zip(STOP_SIGNALS, ranks_asked, strict=True) if ranks)
