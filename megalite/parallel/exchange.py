"""How keys and values that other ranks hold come to a rank, and their gradients go back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.dist.collectives import start_gather, start_reduce_scatter
from megalite.parallel.sequence import missing, overlaps, place, rows, split, unsplit

Parts = Mapping[int, Sequence[slice]]  # by rank of the group: rows that go there, or that come from there


class Exchange(Protocol):
    """Collective: every rank of the group calls the same methods in the same order."""

    def fetch(self, kv: Tensor) -> Callable[[], Tensor]:
        """Begin to bring what this rank attends to; the answer waits for it. kv `[s, …]` are the rank's own rows."""

    def give_back(self, dfar: Tensor, dkv: Tensor) -> None:
        """Add gradients of what was fetched to those of the ranks' own rows, `dkv`."""


# Neither is frozen: PyTorch 2.11 looks into what is when it compiles, and compiles anew for other documents.
@dataclass(eq=False)
class AllGather:
    """Every rank gets the whole sequence in its order (Llama 3, arXiv 2407.21783, §3.3.2)."""

    group: dist.ProcessGroup

    def fetch(self, kv: Tensor) -> Callable[[], Tensor]:
        arriving = start_gather(kv, self.group)
        return lambda: unsplit(arriving.wait().chunk(self.group.size()), "all_gather")

    def give_back(self, dfar: Tensor, dkv: Tensor) -> None:
        cp = self.group.size()
        by_rank = torch.cat([split(dfar, rows("all_gather", cp, rank, len(dfar))) for rank in range(cp)])
        dkv += start_reduce_scatter(by_rank, self.group).wait()


@dataclass(eq=False)
class Halo:
    """A rank gets the positions that lie in the windows of its rows, straight from those that hold them.

    What arrives is in the order of positions. Nothing is sent that the receiver does not attend to, but for documents.
    """

    takes: Parts
    gives: Parts
    group: dist.ProcessGroup

    @staticmethod
    def over(group: dist.ProcessGroup, length: int, window: int) -> "Halo":
        """For sequences of `length`, split as the ring has them."""
        cp, rank = group.size(), group.rank()
        held = [rows("ring", cp, other, length) for other in range(cp)]
        wanted = [missing(mine, window) for mine in held]
        takes = [[place(wanted[rank], x) for x in overlaps(wanted[rank], theirs)] for theirs in held]
        gives = [[place(held[rank], x) for x in overlaps(theirs, held[rank])] for theirs in wanted]
        return Halo(_parts(takes), _parts(gives), group)

    def fetch(self, kv: Tensor) -> Callable[[], Tensor]:
        arriving = _start(kv, self.gives, self.takes, self.group)
        count = sum(part.stop - part.start for parts in self.takes.values() for part in parts)

        def wait() -> Tensor:
            far = kv.new_empty(count, *kv.shape[1:])
            for part, piece in arriving():
                far[part] = piece
            return far

        return wait

    def give_back(self, dfar: Tensor, dkv: Tensor) -> None:
        for part, piece in _start(dfar, self.takes, self.gives, self.group)():
            dkv[part] += piece


def _parts(by_rank: Sequence[Sequence[slice]]) -> Parts:
    return {rank: parts for rank, parts in enumerate(by_rank) if parts}


def _start(x: Tensor, gives: Parts, takes: Parts, group: dist.ProcessGroup) -> Callable[[], list[tuple[slice, Tensor]]]:
    """Begin to send rows of `x` to other ranks, in one message to each; the answer is where what they send belongs."""
    received = {rank: x.new_empty(sum(p.stop - p.start for p in parts), *x.shape[1:]) for rank, parts in takes.items()}
    sent = {rank: torch.cat([x[part] for part in parts]) for rank, parts in gives.items()}
    operations = [dist.P2POp(dist.isend, piece, group=group, group_peer=rank) for rank, piece in sent.items()]
    operations += [dist.P2POp(dist.irecv, piece, group=group, group_peer=rank) for rank, piece in received.items()]
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> list[tuple[slice, Tensor]]:
        for work in works:
            work.wait()
        sent.clear()  # not before, as it was being read
        return [
            found
            for rank, parts in takes.items()
            for found in zip(parts, received[rank].split([p.stop - p.start for p in parts]), strict=True)
        ]

    return wait
