"""A roll call: every rank says what it is doing. A rank that says nothing is lost.

It goes over the job's key-value store, which works when collectives do not. Rounds are numbered. In each, the first
rank to answer collects the answers and concludes, so that not every rank reads all answers from the store.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from megalite.base.errors import ranks_text
from megalite.distributed.health.diagnosis import RankPlace, verdict
from megalite.distributed.health.flight_recorder import RecordedFlight

MAX_ROWS = 16  # rows of a table; every rank's own log has its row


@dataclass(frozen=True)
class Status:
    """Status of one rank: what it is doing."""

    rank: int
    host: str
    step: int
    what: str
    since: float  # when that began, seconds since the epoch
    idle: float  # seconds since the latest sign of progress
    location: str  # in the code
    flight: dict[str, Any] = field(default_factory=dict)  # its collectives, as `Flight.to_json` has them

    def __str__(self) -> str:
        return _words(self, time.time())


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round."""

    fatal: bool
    text: str
    idle: float  # seconds since the latest sign of progress of any rank
    speaker: int  # the rank that tells the user
    answers: int  # ranks that answered


class RollCall:
    """One round, as one rank of `size` takes part in it."""

    def __init__(self, store: dist.Store, size: int, number: int) -> None:
        self.store, self.size = dist.PrefixStore(f"roll call {number}", store), size

    def called(self) -> bool:
        return self.store.check(["call"])

    def call(self, cause: str, doubt: str = "") -> None:
        """Begin the round, unless it has begun.

        cause: how a peer was lost; empty if some rank has seen no progress, or has a doubt. doubt: why a peer may be
        lost; if that peer answers, it is not.
        """
        if doubt:
            self.store.set("doubt", doubt)
        self.store.compare_set("call", "", cause)

    def cause(self) -> str:
        """Say how a peer was lost; empty if that is not why the round was begun."""
        return self.store.get("call").decode()

    def answer(self, status: Status) -> bool:
        """Give this rank's answer. Returns whether it is the first: the rank that gives it has to call `conclude`."""
        self.store.set(f"rank {status.rank}", json.dumps(asdict(status)))
        return self.store.add("answers", 1) == 1

    def complete(self) -> bool:
        return self.store.add("answers", 0) == self.size

    def answers(self) -> list[Status]:
        """Return all answers so far."""
        ranks: Iterable[int] = range(self.size)
        if not self.complete():
            ranks = [rank for rank in ranks if self.store.check([f"rank {rank}"])]
        return [Status(**json.loads(text)) for text in self.store.multi_get([f"rank {rank}" for rank in ranks])]

    def missing(self) -> list[int]:
        """Ranks that have not answered yet."""
        return [] if self.complete() else [r for r in range(self.size) if not self.store.check([f"rank {r}"])]

    def conclude(self, timeout: float, hosts: dist.Store) -> Verdict:
        """Publish the verdict: the job ends if a peer is lost, or if no rank has made progress for `timeout` seconds.

        hosts: holds the host of every rank, also of one that does not answer.
        """
        found = self.answers()
        cause, doubt = self.cause(), self.store.get("doubt").decode() if self.store.check(["doubt"]) else ""
        idle = min(status.idle for status in found)
        present = {status.rank for status in found}
        silent = {rank: hosts.get(str(rank)).decode() for rank in range(self.size) if rank not in present}
        head = cause or doubt or f"no progress for {timeout:g} s (train.timeout)"
        if hint := blame(found, silent):
            head += f"\n  {hint}"
        # Ranks do not stop at the same time: those behind a stuck one still finish what they have.
        fatal = bool(cause or (doubt and silent)) or idle >= timeout / 2
        verdict = Verdict(fatal, f"{head}\n{table(found, silent)}", idle, min(present), len(present))
        self.store.set("verdict", json.dumps(asdict(verdict)))
        return verdict

    def verdict(self) -> Verdict | None:
        return Verdict(**json.loads(self.store.get("verdict"))) if self.store.check(["verdict"]) else None

    def know(self) -> int:
        """Note that this rank has dealt with the verdict. Returns how many ranks have."""
        return self.store.add("know", 1)

    def known(self) -> int:
        return self.store.add("know", 0)


def blame(answers: Sequence[Status], silent: dict[int, str]) -> str:
    """Name the rank and the collective that the others wait for, in a sentence; empty if the records do not show it."""
    flights = {status.rank: RecordedFlight.of_json(status.flight) for status in answers if status.flight}
    places = {status.rank: RankPlace(status.host, status.step, status.what) for status in answers}
    gone = {
        rank: RankPlace(host, max((status.step for status in answers), default=0), "") for rank, host in silent.items()
    }
    return verdict(flights, gone | places)


def table(answers: Sequence[Status], silent: dict[int, str]) -> str:
    """One line for all ranks that do the same: first those that do not answer, by host, then who does it longest."""
    now = time.time()
    groups: dict[tuple[int, str, str], list[Status]] = {}
    for status in sorted(answers, key=lambda status: status.since):
        groups.setdefault((status.step, status.what, status.location), []).append(status)
    by_host: dict[str, list[int]] = {}
    for rank, host in silent.items():
        by_host.setdefault(host, []).append(rank)
    rows = [f"{ranks_text(ranks)} on {host}: no answer, lost" for host, ranks in by_host.items()]
    for group in groups.values():
        ranks = sorted(status.rank for status in group)
        where = f" on {group[0].host}" if len({status.host for status in group}) == 1 else ""
        rows.append(f"{ranks_text(ranks)}{where}: {_words(group[0], now)}")
    rest = [f"and {len(rows) - MAX_ROWS} more such lines; every rank's log has its own"] if len(rows) > MAX_ROWS else []
    return "\n".join(f"  {row}" for row in rows[:MAX_ROWS] + rest)


def _words(status: Status, now: float) -> str:
    return f"step {status.step}, {status.what}, for {now - status.since:.0f} s, at {status.location}"
