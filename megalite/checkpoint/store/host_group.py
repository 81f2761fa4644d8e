"""Process group of all ranks of a job on the host, which nothing else uses: for what they must agree on.

Its collectives may run in a thread beside training without disturbing those of training. Two threads need two groups.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megalite.base.errors import InputError, Unhealthy

T = TypeVar("T")
WRITE_TIMEOUT = timedelta(
    days=1
)  # a rank may wait for another's slow disk; the watchdog ends what does not move at all


class ElsewhereError(RuntimeError):
    """Another rank failed."""


class HostGroup:
    """All ranks of the job. It is made on all of them at once, and its methods are collective."""

    def __init__(self, purpose: str = "checkpoints") -> None:
        self.group = dist.new_group(timeout=WRITE_TIMEOUT, backend="gloo", group_desc=purpose)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    @property
    def leads(self) -> bool:
        """Flag: this is the first rank, which acts for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks, on the first rank; None on the others."""
        values: list[Any] | None = [None] * self.ranks if self.leads else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def tell(self, value: T, source: int = 0) -> T:
        """The value of the rank `source`, on every rank."""
        told = [value]
        dist.broadcast_object_list(told, src=source, group=self.group)
        return told[0]

    def share(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        found = self.tell(self.gather(value))
        assert found is not None, "the first rank has gathered"
        return found

    def scatter(self, values: list[T] | None) -> T:
        """Receive this rank's element of `values`, which the first rank has."""
        taken: list[Any] = [None]
        dist.scatter_object_list(taken, values, src=0, group=self.group)
        return taken[0]

    def once(self, call: Callable[[], T]) -> T:
        """Run `call` on the first rank only; every rank returns or raises what it did there."""
        outcome = self.tell(_attempt(call, self.rank) if self.leads else None)
        assert outcome is not None, "the first rank has called"
        return _unpack(outcome)

    def everywhere(self, call: Callable[[], T]) -> T:
        """Run `call` on every rank; what it returns here. If any raises, all raise the lowest such rank's error."""
        value, error = _attempt(call, self.rank)
        errors = self.gather(error)
        first = next((error for error in errors if error is not None), None) if errors is not None else None
        return _unpack((value, self.tell(first)))


def _attempt(call: Callable[[], T], rank: int) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except (ValueError, Unhealthy) as error:  # bad input and damage; a drive that has lost states
        return None, error
    except OSError as error:  # refusals of the file system
        return None, InputError(str(error))
    except Exception as error:  # noqa: BLE001 - not every exception can travel
        return None, ElsewhereError(f"rank {rank}: {error!r}")


def _unpack(outcome: tuple[T | None, Exception | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
