"""Exchanges of context parallelism: a rank fetches keys and values of other ranks, and sends their gradients back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.collectives import start_gather, start_reduce_scatter
from megalite.parallel.sequence import missing, overlaps, place, rows, split, unsplit

Parts = Mapping[int, Sequence[slice]]  # by rank of the group: rows sent to that rank, or received from it


class KeyValueExchange(Protocol):
    """A way to fetch keys and values. Collective: all ranks of the group call the same methods in the same order."""

    def fetch(self, kv: Tensor) -> Callable[[], Tensor]:
        """Start to fetch the keys and values that this rank attends to. Returns a function that waits for them.

        kv `[s, …]`: the rank's own rows.
        """

    def give_back(self, dfar: Tensor, dkv: Tensor) -> None:
        """Send `dfar`, the gradients of fetched rows, to the ranks that own these rows and add them to their `dkv`."""


# These dataclasses are not frozen: PyTorch 2.11 looks into frozen ones, and compiles anew for other documents.
@dataclass(eq=False)
class AllGather:
    """Every rank gathers the whole sequence, in the order of positions (Llama 3, arXiv 2407.21783, §3.3.2)."""

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
    """A rank receives the positions that lie in the windows of its rows, directly from the ranks that hold them.

    Received rows are in the order of positions. The ends of documents are not considered: rows are sent even if they
    belong to a document that the receiver does not attend to.
    """

    takes: Parts
    gives: Parts
    group: dist.ProcessGroup

    @staticmethod
    def over(group: dist.ProcessGroup, length: int, window: int) -> "Halo":
        """The exchange for sequences of `length`, split as for the ring."""
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
    """Start to send rows of `x`, one message per rank. Returns a function that waits for received rows and places."""
    received = {rank: x.new_empty(sum(p.stop - p.start for p in parts), *x.shape[1:]) for rank, parts in takes.items()}
    sent = {rank: torch.cat([x[part] for part in parts]) for rank, parts in gives.items()}
    operations = [dist.P2POp(dist.isend, piece, group=group, group_peer=rank) for rank, piece in sent.items()]
    operations += [dist.P2POp(dist.irecv, piece, group=group, group_peer=rank) for rank, piece in received.items()]
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> list[tuple[slice, Tensor]]:
        for work in works:
            work.wait()
        sent.clear()  # only now, since sending reads it until here
        return [
            found
            for rank, parts in takes.items()
            for found in zip(parts, received[rank].split([p.stop - p.start for p in parts]), strict=True)
        ]

    return wait
