"""Decisions of the supervisor on its next step. The code decides from its arguments; it does not ask, wait or write.

The memory of a run is its events: they outlive the job, so that a requeued job, or the next one, still knows which node
has failed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..base.events import Event
from ..base.outcome import BAD_INPUT, DONE, STOPPED, UNHEALTHY
from ..base.slurm import SlurmJob
from ..base.verdict import (
    CONTACT_LOSS,
    FINISH,
    HANG,
    HEALTH_FAILURE,
    INPUT_ERROR,
    KILL,
    RETRIED_CAUSES,
    STOP,
    TIMEOUT,
    Ended,
)

RELAUNCH, REQUEUE, END = "relaunch", "requeue", "end"
NODE_SHORTAGE = 69  # too few nodes are fit for use; as EX_UNAVAILABLE
STANDSTILL = 70  # too many attempts without a newer checkpoint, for Kubernetes, which goes by exit codes alone
OUT_OF_MEMORY = "OutOfMemoryError: "  # in a traceback: a GPU's, by PyTorch; the host's ends as a kill
FAILURE_MEMORY = 24 * 3600.0  # seconds that a failure speaks against a node
PAUSES = (5.0, 300.0)  # seconds of the first pause before another attempt, which doubles, and of the longest
MEETING_FAILURES = (CONTACT_LOSS, HANG, KILL, STOP, TIMEOUT)  # say nothing of training where ranks have not met before
MAX_COUNTED_GAP = 10.0  # seconds between two looks that count as silence, at most: this process may have slept


@dataclass(frozen=True)
class RestartLimits:
    """Limits after which to give up, and times to wait, in seconds."""

    attempts: int = 3  # in a row without a newer checkpoint
    pauses: int = 12  # in a row, as for a file that is away; 35 minutes in all
    requeues: int = 1000
    strikes: int = 2  # failures of a node within FAILURE_MEMORY, after which it is left out
    reap: float = 20.0  # from the first failure to the kill of what is left
    close: float = 120.0  # the same, after all ranks have said that they end well
    grace: float = 240.0  # from a request to stop to the kill
    silence: float = 3600.0  # in which nothing moves in the run folder
    patience: float = 600.0  # with a controller of Slurm that does not answer
    oom_ends: bool = False  # end when a GPU is out of memory, as it would be again


@dataclass(frozen=True)
class Wants:
    """Wanted number of nodes, and of ranks on each. nodes: 0 for all but the spares."""

    nodes: int = 0
    least: int = 0  # 0: as many as `nodes`
    spares: int = 0
    ranks_per_node: int = 1

    def of(self, allocated: int) -> Wants:
        """Replace each 0 by its number, for a job that has `allocated` nodes."""
        nodes = self.nodes or max(1, allocated - self.spares)
        return replace(self, nodes=nodes, least=min(self.least or nodes, nodes))


@dataclass(frozen=True)
class Move:
    """The supervisor's next step: relaunch, requeue or end, with the exit code if it comes to an end."""

    kind: str
    code: int
    reason: str
    pause: float = 0.0  # seconds before the relaunch


@dataclass(frozen=True)
class Past:
    """Outcome of a job's attempts so far, the latest included."""

    stuck: int = 0  # in a row that saved no newer checkpoint
    pauses: int = 0  # in a row, since one in which ranks have trained
    trained: bool = False  # in any

    @staticmethod
    def of(events: Iterable[Event], job: str) -> Past:
        """Count the run's events. Starts without nodes count as stuck; attempts in which ranks never met do not."""
        stuck = pauses = 0
        trained = False
        for event in events:
            if event.get("job") != job:
                continue
            if event["event"] == "attempt_ended":
                first, last, cause = event.get("from_step"), event.get("to_step"), event.get("cause")
                progress = isinstance(first, int) and isinstance(last, int) and last > first
                untold = cause == STOP and bool(event.get("first"))  # asked for, says an exit code alone
                if not progress and (
                    cause == INPUT_ERROR or (event.get("met") is False and cause in MEETING_FAILURES and not untold)
                ):
                    continue
                stuck = 0 if progress else stuck + 1
                pauses, trained = 0, trained or progress or event.get("met") is True
            elif event["event"] == "requeue" and event.get("code") == NODE_SHORTAGE:
                stuck += 1
            elif event["event"] == "waiting":
                pauses += 1
        return Past(stuck, pauses, trained)


def next_move(ended: Ended, past: Past, limits: RestartLimits) -> Move:
    """Decide the next step after an attempt."""
    told = f": {ended.first}" if ended.first else ""
    if ended.cause == FINISH:
        return Move(END, DONE, "training is done")
    if ended.cause == INPUT_ERROR and not (past.trained and ended.asked):
        return bad_input(f"bad input{told}", past, limits)
    if ended.cause == HEALTH_FAILURE:
        return Move(END, ended.code, f"training is unhealthy{told}")
    if ended.cause == STOP and ended.code != STOPPED:
        return Move(END, ended.code, "interrupted at once by a second SIGINT")
    if limits.oom_ends and ended.first and OUT_OF_MEMORY in ended.first.text:
        return Move(END, ended.code, f"out of memory, as it would be again{told}")
    if not ended.asked and not ended.met and ended.cause in RETRIED_CAUSES and ended.cause in MEETING_FAILURES:
        return after_a_pause(ended.code, f"{ended.cause}, before all ranks had met{told}", past, limits)
    if past.stuck >= limits.attempts:
        return Move(END, ended.code, f"{past.stuck} attempts in a row have saved no newer checkpoint{told}")
    if ended.cause == STOP:
        return Move(REQUEUE, STOPPED, f"stopped on request{f' ({ended.first})' if ended.first else ''}; {ended.saved}")
    if ended.asked or ended.cause == TIMEOUT:
        return Move(REQUEUE, STOPPED, f"ended ({ended.cause}) while it was to stop; {ended.saved}")
    return Move(RELAUNCH, ended.code, f"{ended.cause}{told}")


def bad_input(told: str, past: Past, limits: RestartLimits) -> Move:
    """Decide when a configuration or its files are refused: if the job has trained, they were good and may return."""
    if not past.trained:
        return Move(END, BAD_INPUT, f"{told}; it does not get better by trying again")
    return after_a_pause(BAD_INPUT, f"{told}; this job has trained with it before", past, limits)


def after_a_pause(code: int, reason: str, past: Past, limits: RestartLimits) -> Move:
    """Decide on another attempt after a pause, longer each time; after enough of them on the end, with `code`."""
    if past.pauses >= limits.pauses:
        return Move(END, code, f"{reason}; {past.pauses} pauses in a row have not fixed that")
    return Move(RELAUNCH, code, reason, min(PAUSES[0] * 2**past.pauses, PAUSES[1]))


def no_nodes(count: int, least: int, stuck: int, limits: RestartLimits) -> Move:
    """Decide when fewer nodes than `least` are fit. stuck: as in `Past`, with this start of the job."""
    told = f"{count} of at least {least} nodes are fit for use"
    if stuck >= limits.attempts:
        return Move(END, NODE_SHORTAGE, f"{told}, and {stuck} attempts in a row have saved no newer checkpoint")
    return Move(REQUEUE, NODE_SHORTAGE, told)


def why_not_requeue(job: SlurmJob | None, restart: int, limits: RestartLimits) -> str:
    """Return why a job must not or cannot be requeued; empty if it may.

    job: as Slurm sees it now; None if Slurm does not answer. A job that was cancelled, has met its time limit or was
    requeued by others does not run any more, or its restarts are counted further: requeuing it would bring it back
    against somebody's will.
    """
    if job is None:
        return "Slurm does not answer"
    if job.runs and job.restarts > restart:
        return "Slurm has requeued and started the job meanwhile"
    if not job.goes_on(restart):
        why = f", {job.reason}" if job.reason not in ("None", "(null)") else ""
        return f"Slurm says that the job is {job.state}{why}: it was cancelled, requeued or is ending"
    if not job.may_requeue:
        return "it was submitted with --no-requeue; submit it again to go on"
    if restart >= limits.requeues:
        return f"it was requeued {restart} times"
    return ""


def struck_nodes(events: Iterable[Event], now: float, strikes: int) -> dict[str, int]:
    """Nodes that were the first to fail at least `strikes` times within a day of `now`, in any job, and how often."""
    counts: dict[str, int] = {}
    for event in events:
        first = event.get("first")
        if event["event"] != "attempt_ended" or not isinstance(first, dict) or not _of_late(event, now):
            continue
        if event.get("cause") in RETRIED_CAUSES and not event.get("asked") and isinstance(first.get("node"), str):
            counts[first["node"]] = counts.get(first["node"], 0) + 1
    return {node: count for node, count in counts.items() if count >= strikes}


def slow_nodes(events: Iterable[Event], now: float) -> set[str]:
    """Nodes that ranks have called stragglers of late."""
    found = (event for event in events if event["event"] == "straggler" and _of_late(event, now))
    return {event["node"] for event in found if isinstance(event.get("node"), str)}


def _of_late(event: Event, now: float) -> bool:
    """Return whether an event is within a day of `now`. One that a wrong clock has dated ahead would count for ever."""
    return abs(now - float(event["time"])) <= FAILURE_MEMORY


@dataclass(frozen=True)
class Choice:
    """Nodes for an attempt, in Slurm's order, and those that could serve but are left out."""

    nodes: tuple[str, ...]  # empty if there are too few
    left_out: tuple[tuple[str, str], ...] = ()  # node and why
    fit: int = 0  # how many could serve


def choose(
    healthy: Sequence[str],
    struck: dict[str, int],
    slow: set[str],
    sizes: tuple[int, int],
    fits: Callable[[int], bool],
) -> Choice:
    """Choose the nodes of an attempt.

    sizes: the number that is wanted and the least that will do. fits: whether training can run on so many. A slow node
    serves where there is no better one for its place. A node that has failed before serves only where there would be
    too few otherwise: a bad night on a suspicious node is better than none, and the bound on attempts ends it.
    """
    want, least = sizes
    trusted = [node for node in healthy if node not in struck and node not in slow]
    trusted += [node for node in healthy if node not in struck and node in slow]
    pool = trusted + [node for node in healthy if node in struck][: max(0, least - len(trusted))]
    size = next((size for size in range(min(want, len(pool)), least - 1, -1) if fits(size)), 0)
    chosen = set(pool[:size])
    left_out = {node: f"it was the first to fail {struck[node]} times" for node in healthy if node in struck}
    left_out.update((node, "its ranks are slow") for node in healthy if node in slow and node not in struck)
    return Choice(
        tuple(node for node in healthy if node in chosen),
        tuple((node, why) for node, why in left_out.items() if node not in chosen) if size else (),
        len(pool),
    )


class Patience:
    """Judge of an attempt that is under way: `look`, called now and then, says why it has to be killed."""

    def __init__(self, limits: RestartLimits, now: float) -> None:
        self.limits, self.before, self.quiet = limits, now, 0.0
        self._since: dict[str, float] = {}
        self._trace: object = None

    def look(self, now: float, failed: bool, over: bool, asked: bool, trace: object) -> str:
        """Return why the attempt has to be killed; empty if it does not.

        failed: a rank has written a failure. over: all ranks have said that they end as they should. asked: the
        supervisor was asked to stop. trace: whatever changes as the run moves.
        """
        self.quiet = self.quiet + min(now - self.before, MAX_COUNTED_GAP) if trace == self._trace else 0.0
        self.before, self._trace = now, trace
        for name, holds, patience, text in (
            ("failed", failed, self.limits.reap, "a rank has failed {:.0f} s ago and others have not ended"),
            ("over", over, self.limits.close, "the ranks have said {:.0f} s ago that they end, and have not"),
            ("asked", asked, self.limits.grace, "the ranks were asked to stop {:.0f} s ago and have not"),
        ):
            if not holds:
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) >= patience:
                return text.format(now - self._since[name])
        if self.silent:
            return f"nothing has moved in the run folder for {self.quiet:.0f} s"
        return ""

    @property
    def silent(self) -> bool:
        return 0 < self.limits.silence <= self.quiet


WRITE_FAILURE = Move(END, UNHEALTHY, "the run folder cannot be written to")
