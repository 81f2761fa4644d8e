"""Bandwidth between pairs of nodes, with two different partners where there are three nodes or more."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from .board import Board, Unreachable
from .trainer import Trainer, TrainerError

PROBE = "megalite.distributed.start.probe"
INFINIBAND = Path("/sys/class/infiniband")  # RoCE adapters as well
PARTNER_SECONDS = 60.0  # seconds for a partner that is still measuring alone
PAIR_SECONDS = 60.0  # seconds for one pair


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs of nodes that measure together: neighbours, then the other neighbours.

    Every node is in two pairs; if there are two nodes, twice with the same partner. An odd number takes three rounds.
    """
    n = len(nodes)
    if n < 2:
        return []
    whole = [(nodes[place], nodes[(place + 1) % n]) for place in range(n)]  # a ring, in which each pair is an edge
    even, odd = whole[0 : n - n % 2 : 2], whole[1::2]
    return [even, odd, [whole[-1]]] if n % 2 else [even, odd]


def measure_pairs(
    node: str, nodes: Sequence[str], board: Board, trainer: Trainer, gpus: int, size: int, deadline: float
) -> list[dict[str, Any]]:
    """Measure all-reduces over this node and each of its partners: partner, bytes/s of bus bandwidth, or the error."""
    found = []
    for number, pairs in enumerate(rounds(nodes)):
        for first, second in pairs:
            if node in (first, second):
                partner = second if node == first else first
                result: dict[str, Any] = {"partner": partner, "round": number, "ranks": max(1, gpus)}
                try:
                    ranks = _Pair(f"pair:{number}:{first}:{second}", first, board, trainer, gpus, size, deadline)
                    result["rate"] = ranks.measure(0 if node == first else 1)
                except Unreachable as error:
                    result["absent"] = str(error)
                except TrainerError as error:
                    result["error"] = str(error)
                found.append(result)
    return found


class _Pair:
    """One measurement of two nodes, of which the first keeps the store in which their ranks meet."""

    def __init__(
        self, key: str, host: str, board: Board, trainer: Trainer, gpus: int, size: int, deadline: float
    ) -> None:
        self._key, self._host, self._board, self._trainer = key, host, board, trainer
        self._gpus, self._size, self._deadline = gpus, size, deadline

    def measure(self, side: int) -> float:
        """Run this node's half of the ranks, those of side 0 or 1. Raises Unreachable or TrainerError."""
        wait = min(PARTNER_SECONDS, self._deadline - time.monotonic())
        self._board.put(f"{self._key}:ready:{side}", True)
        self._board.get(f"{self._key}:ready:{1 - side}", wait)
        if side == 0:
            with socket.socket() as probe:  # a port that is free now
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            self._board.put(f"{self._key}:port", port)
        port = self._board.get(f"{self._key}:port", wait)
        limit = min(PAIR_SECONDS, max(1.0, self._deadline - time.monotonic()))
        ranks = [
            [
                *rank_arguments(self._gpus, place),
                *("--parts", "all_reduce", "--store", f"{self._host}:{port}", "--bytes", str(self._size)),
                *("--rank", str(side * max(1, self._gpus) + place), "--world-size", str(2 * max(1, self._gpus))),
                *("--timeout", str(limit)),
            ]
            for place in range(max(1, self._gpus))
        ]
        answers = self._trainer.crew(PROBE, ranks, limit)
        if not all(answer["right"] for answer in answers):
            raise TrainerError("the all-reduce gave wrong sums")
        return float(min(answer["all_reduce"] for answer in answers))


def rank_arguments(gpus: int, place: int) -> list[str]:
    """Return the arguments that give a rank its device: a GPU, or the CPU where there is none."""
    return ["--device", "cuda" if gpus else "cpu", "--local-rank", str(place)]


def adapters_rate(gpus: int, folder: Path = INFINIBAND) -> Optional[float]:
    """Bytes/s of the active InfiniBand or RoCE ports together: the fastest of them, one for each GPU; None without any.

    A node may have more ports than GPUs, for storage: those are not counted.
    """
    rates = []
    for port in folder.glob("*/ports/*"):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
            if "ACTIVE" in state:
                rates.append(float(rate.split()[0]) * 1e9 / 8)  # as in `400 Gb/sec (4X NDR)`
        except (OSError, ValueError, IndexError):
            continue
    return sum(sorted(rates)[-max(1, gpus) :]) if rates else None
