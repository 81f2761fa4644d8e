"""Expert parallelism: rows go to the ranks of their experts, and results come back.

A dispatch is what `Experts` asks for this: `send` begins to send tokens with their scores, and `compute` returns what
experts make of them, summed. Here are two, for ranks that share out experts and for one that has all of them; a third,
with buffers of a fixed size, is in `gathered`.

Every rank of the group has as many experts, the first one those with the lowest numbers. Rows are in the order of
experts, so what goes to a rank is a run. From all ranks, rows arrive in the order of these and of experts, and are put
into that of experts alone. Backward sends gradients the other ways. The host waits once for how many rows arrive.
Other work can be done while rows travel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.experts import Rows
from megalite.parallel.turns import give_way

Compute = Callable[[Tensor, Tensor, Rows], Tensor]  # results of rows with their scores
Spread = Callable[[Rows, Tensor], Tensor]  # rows of tokens, as `Rows.spread` makes them


class AtHome:
    """Experts that are all here. rows: of tokens."""

    def __init__(self, rows: Rows, spread: Spread) -> None:
        self.rows, self._spread = rows, spread

    def send(self, x: Tensor, scores: Tensor) -> None:
        """Take tokens `[…, d]` with their scores `[…, K]`."""
        self._taken = [x, scores]

    def compute(self, experts: Compute) -> Tensor:
        """The sums `[…, d]` of what `experts` make of every token."""
        taken = self._taken.pop
        return self.rows.collect(experts(self._spread(self.rows, taken(0)), self.rows.permuted(taken(0)), self.rows))


class Dispatch:
    """The exchange of a rank's `rows` over `group`. Collective, as are its methods."""

    def __init__(self, rows: Rows, group: dist.ProcessGroup) -> None:
        self.own, self.group, ranks = rows, group, group.size()
        mine = rows.on_device.view(ranks, -1)  # by rank and its expert: rows that this rank sends
        theirs = torch.empty_like(mine)
        counting = dist.all_to_all_single(theirs, mine, group=group, async_op=True)
        give_way()
        counting.wait()
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

    def send(self, x: Tensor, scores: Tensor) -> None:
        """Begin to send tokens `[…, d]` with their scores `[…, K]`. Work until `compute` runs beside it."""
        rows = self.own.spread(x), self.own.permuted(scores)
        self._on_their_way = [Exchange(self.sent, self.arriving, self.group).begun(*rows)]

    def compute(self, experts: Compute) -> Tensor:
        """The sums `[…, d]` of what `experts` of all ranks make of every token that was sent."""
        # Rows have no names here, by which they would be held for longer than they are needed.
        arrived = list(self._on_their_way.pop()())
        made = [experts(self.rows.spread(arrived.pop(0)), self.rows.permuted(arrived.pop(0)), self.rows)]
        back = [Exchange(self.arriving, self.sent, self.group).begun(self.rows.collect(made.pop()))]
        return self.own.collect(back.pop()()[0])


class Exchange:
    """Rows that ranks exchange, and their gradients: `sent` and `arriving` are numbers of rows by rank.

    Two steps of autograd, so that what lies between them runs beside the exchange, in backward too. So does what a
    pass beside this one computes.
    """

    def __init__(self, sent: Sequence[int], arriving: Sequence[int], group: dist.ProcessGroup) -> None:
        self.sent, self.arriving, self.group = sent, arriving, group
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def begun(self, *rows: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to send `rows`, of equal numbers. Returns what waits for those that arrive."""
        return partial(_End.apply, self, *_Begin.apply(self, *rows))

    def begin(self, rows: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        """The rows that will have arrived after `end`."""
        sent, arriving = (self.arriving, self.sent) if back else (self.sent, self.arriving)
        for each in rows:
            found = each.new_empty(sum(arriving), *each.shape[1:])
            own = each.contiguous()
            work = dist.all_to_all_single(found, own, list(arriving), list(sent), group=self.group, async_op=True)
            self._under_way.append((work, found))
        return tuple(found for _, found in self._under_way)

    def end(self) -> Sequence[Tensor]:
        """Wait for the rows. Returns them."""
        give_way()
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            work.wait()
        return [found.view_as(found) for _, found in under_way]  # another tensor than the one that `begin` has returned


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.begin(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.end()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *arrived: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.end())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.begin(grads, back=True)
        return None, *grads  # not used: what arrives has another shape
