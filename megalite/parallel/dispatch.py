"""Expert parallelism: rows go to the ranks of their experts, and what these make of them comes back.

Every rank of the group has as many experts, the first one those with the lowest numbers. Rows are in the order of
experts, so what goes to a rank is a run. From all ranks, rows arrive in the order of these and of experts, and are put
into that of experts alone. Backward sends gradients the other ways. The host waits once for how many rows arrive.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.experts import Rows


class Dispatch:
    """The exchange of a rank's `rows` over `group`. Collective, as are its methods."""

    def __init__(self, rows: Rows, group: dist.ProcessGroup) -> None:
        self.group, ranks = group, group.size()
        mine = rows.on_device.view(ranks, -1)  # by rank and its expert: rows that this rank sends
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        if rows.known is None:
            sent, arriving = torch.stack((mine, theirs)).tolist()
        else:  # all ranks know the same
            sent = [rows.known[at : at + mine.shape[1]] for at in range(0, len(rows.known), mine.shape[1])]
            arriving = [sent[group.rank()]] * ranks
            theirs = torch.tensor(arriving, device=mine.device)
        self.sent, self.arriving = ([sum(counts) for counts in table] for table in (sent, arriving))
        numbers = torch.arange(mine.shape[1], device=mine.device).repeat(ranks)
        experts = numbers.repeat_interleave(theirs.flatten(), output_size=sum(self.arriving))
        counts = [sum(of_rank) for of_rank in zip(*arriving, strict=True)]
        self.rows = Rows(experts[:, None], mine.shape[1], counts, rows.backend)  # the rows of this rank's experts

    def compute(self, experts: Callable[[Tensor, Tensor, Rows], Tensor], x: Tensor, scores: Tensor) -> Tensor:
        """The results of `experts` of all ranks for rows `[n, d]` with their scores `[n]`."""
        taken, scores = self._sent(x), self._sent(scores)
        y = experts(self.rows.spread(taken), self.rows.permuted(scores), self.rows)
        back: Tensor = _AllToAll.apply(self.rows.collect(y), self.arriving, self.sent, self.group)
        return back

    def _sent(self, x: Tensor) -> Tensor:
        sent: Tensor = _AllToAll.apply(x, self.sent, self.arriving, self.group)
        return sent


class _AllToAll(torch.autograd.Function):
    """Rows that ranks exchange: `sent` and `arriving` are numbers of rows by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.arriving, ctx.group = sent, arriving, group
        return _exchanged(x, sent, arriving, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.arriving, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), list(arriving), list(sent), group=group)
    return found
