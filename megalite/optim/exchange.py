"""Exchanges pieces of matrices between ranks, as `plan.muon` plans it. Each exchange is one all-to-all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.plan.muon import Box, Piece, moves

Views = dict[int, list[tuple[Box, Tensor]]]  # by matrix: its boxes, each with its view of a buffer


class PieceExchange:
    """The pieces that one rank sends to and receives from each of `ranks` ranks.

    A buffer is ordered by peer, and for each peer in the order of `pieces`, which is the same for sender and receiver.
    """

    def __init__(self, pieces: Sequence[Piece], rank: int, ranks: int) -> None:
        self.sent = sorted((piece for piece in pieces if piece.source == rank), key=lambda piece: piece.target)
        self.received = sorted((piece for piece in pieces if piece.target == rank), key=lambda piece: piece.source)
        self.to, self.of = [0] * ranks, [0] * ranks  # elements, by peer
        for piece in self.sent:
            self.to[piece.target] += piece.elements
        for piece in self.received:
            self.of[piece.source] += piece.elements
        self.moves = moves(pieces)  # for all ranks: all take part in the all-to-all, or none

    def begin(self, dtype: torch.dtype, device: torch.device) -> "Outgoing":
        """A new send buffer, to be filled."""
        buffer = torch.empty(sum(self.to), dtype=dtype, device=device)
        return Outgoing(self, buffer, _views(buffer, self.sent))


@dataclass
class Outgoing:
    """A send buffer."""

    exchange: PieceExchange
    buffer: Tensor
    views: Views

    def put(self, matrix: int, value: Tensor, held: Box) -> None:
        """Copy the pieces of `matrix` into the buffer. value: the elements of the matrix in the box `held`."""
        rows, columns = held
        for (lines, across), view in self.views.get(matrix, ()):
            first, left = lines.start - rows.start, across.start - columns.start
            view.copy_(value[first : first + len(lines), left : left + len(across)])

    def send(self, group: dist.ProcessGroup | None) -> "Arriving":
        """Start the exchange. Collective over `group`, unless no rank sends anything to another."""
        exchange, buffer = self.exchange, self.buffer
        if group is None or not exchange.moves:
            return Arriving(exchange, buffer, buffer, None)
        arriving = buffer.new_empty(sum(exchange.of))
        work = dist.all_to_all_single(arriving, buffer, exchange.of, exchange.to, group, async_op=True)
        return Arriving(exchange, arriving, buffer, work)


@dataclass
class Arriving:
    """A started exchange."""

    exchange: PieceExchange
    buffer: Tensor
    sent: Tensor | None  # must live until it is sent
    work: dist.Work | None

    def wait(self) -> Views:
        """The received pieces, by matrix. On CUDA, the stream waits for them, not the host."""
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        return _views(self.buffer, self.exchange.received)


def _views(buffer: Tensor, pieces: Sequence[Piece]) -> Views:
    found: Views = {}
    for piece, flat in zip(pieces, buffer.split([piece.elements for piece in pieces]), strict=True):
        found.setdefault(piece.matrix, []).append((piece.box, flat.view(len(piece.box[0]), len(piece.box[1]))))
    return found
