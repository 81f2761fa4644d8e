"""Expert parallelism with buffers of a fixed size: nothing here hangs on what tokens choose, so the host never waits.

Every rank gets the T tokens of each of n ranks, and makes rows of those that have chosen experts of its own. It
has room for T · n · min(K, E/n), as many as there can be, and the device alone knows how many there are. It returns
the sum of a token's results here, rounded once; the n sums are added up in float32 or wider where the token is.
Backward is the mirror: gradients of sums go to all, and those of tokens come back and are summed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.collectives import start_gather
from megalite.parallel.dispatch import Compute, Exchange, Spread
from megalite.parallel.experts import Rows, rows_of_experts
from megalite.parallel.turns import give_way
from megalite_kernels.backend import Backend


class Gathered:
    """The dispatch of tokens that have chosen `experts` `[…, K]`, of `count`, over `group`. Collective, as are its
    methods.

    counts: by expert, its rows of this rank's tokens, where the host knows them and all ranks have the same.
    """

    def __init__(
        self,
        experts: Tensor,
        count: int,
        group: dist.ProcessGroup,
        spread: Spread,
        counts: Sequence[int] | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.group, self._spread = group, spread
        ranks, each = group.size(), count // group.size()
        gathering, first = start_gather(experts, group), group.rank() * each
        give_way()
        every = gathering.wait()
        mine = torch.where((every >= first) & (every < first + each), every - first, each)
        known = None if counts is None else [ranks * rows for rows in counts[first : first + each]]
        self.rows = Rows(mine, each, known, backend, room=every[..., :each].numel())
        self.chosen = rows_of_experts(experts.flatten(), count)

    def send(self, x: Tensor, scores: Tensor) -> None:
        """Begin to send tokens `[…, d]` with their scores `[…, K]`. Work until `compute` runs beside it."""
        self._on_their_way = [_Gathering(self.group, sums=False).begun(x, scores)]

    def compute(self, experts: Compute) -> Tensor:
        """The sums `[…, d]` of what `experts` of all ranks make of every token that was sent."""
        arrived = list(self._on_their_way.pop()())
        made = [experts(self._spread(self.rows, arrived.pop(0)), self.rows.permuted(arrived.pop(0)), self.rows)]
        return _Gathering(self.group, sums=True).begun(self.rows.collect(made.pop()))()[0]


class _Gathering(Exchange):
    """Rows of all ranks for each. sums: the other way, each rank gets the sums of what all have for its rows."""

    def __init__(self, group: dist.ProcessGroup, sums: bool) -> None:
        super().__init__((), (), group)
        self._sums, self._summing = sums, sums

    def begin(self, rows: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        """Tensors without content, of the shapes of those that `end` will return."""
        self._summing = self._sums != back
        for each in rows:
            if self._summing:
                found = torch.empty_like(each, memory_format=torch.contiguous_format)
                work = dist.all_to_all_single(found, each.contiguous(), group=self.group, async_op=True)
            else:
                gathering = start_gather(each, self.group)
                found, work = gathering.result, gathering.work
            self._under_way.append((work, found))
        count = len(found) // (self.group.size() if self._summing else 1)
        return tuple(each.new_empty_strided((count, *each.shape[1:]), (0,) * each.dim()) for each in rows)

    def end(self) -> Sequence[Tensor]:
        """Wait for the rows. Returns them, or their sums."""
        arrived = super().end()
        return [each.unflatten(0, (self.group.size(), -1)).sum(0) for each in arrived] if self._summing else arrived
