"""A thread that turns a hang, or a lost rank, into an error that says what every rank is doing."""

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.base.exit_codes import ExitCode
from megalite.distributed.health.activity import HIDDEN_PREFIX, Activity, Awaiting, locations, stacks
from megalite.distributed.health.flight_recorder import keep, record, recorded
from megalite.distributed.health.neighbour import Neighbour, all_ended
from megalite.distributed.health.rollcall import RollCall, Status, Verdict
from megalite.distributed.start.failure_report import briefly, note_failure, tell
from megalite.distributed.start.local import MEETING
from megalite.distributed.start.meeting import Meeting, kept, reason
from megalite.distributed.start.ranks import EXIT_DELAY, RankInfo, let_others_speak
from megalite.distributed.start.start import explain, is_lost_peer

END = object()
LOOKS_PER_SECOND = 1600  # at the store, of all ranks, in a second
SILENCE = 60.0  # seconds without an answer, after which the store counts as lost: disks and hosts stall for a while
ANSWER_LOOKS = 3  # in which a rank that is alive answers
LAUNCHER_LEAD = 2.0  # seconds in which a launcher may end this rank because of another: it takes 0.7 s
DEPUTY_LEAD = 1.5  # seconds by which the deputy tells of the loss of the store before others, who then need not

log = logging.getLogger("megalite")


@contextmanager
def watched(
    meeting: Meeting, rank_info: RankInfo, activity: Activity, timeout: float, flights: Path | None = None
) -> Iterator[None]:
    """End the process with LOST_CONTACT if no rank notes any activity for `timeout` seconds, or a peer is lost.

    Collective: ranks leave together, by a barrier of the default process group, which must exist by then.

    flights: a folder, in which ranks that end so leave what they have recorded of their collectives.
    """
    activity.tick()
    record()
    watchdog = Watchdog(meeting, rank_info, activity, timeout, flights)
    try:
        with _noting_failures(rank_info, activity):
            yield
            activity("waiting for the other ranks to end")
            dist.barrier()
    except RuntimeError as error:
        if is_lost_peer(error):
            watchdog.give_up(error)
        raise
    finally:
        watchdog.stop()


@contextmanager
def _noting_failures(rank_info: RankInfo, activity: Activity) -> Iterator[None]:
    """Note at once, for the supervisor, what fails meanwhile, and in which step."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        note_failure(*explain(error), rank_info, activity.step)
        raise


def between_looks(timeout: float, ranks: int) -> float:
    """Seconds between two looks of a rank: few, but enough that the store bears the looks of all ranks."""
    return min(max(timeout / 20, 0.5), max(1.0, ranks / LOOKS_PER_SECOND), 10.0)


def _neighbour(store: dist.Store, rank_info: RankInfo) -> Neighbour | None:
    """The next rank, to look after. None where the local launcher looks after all, or where it cannot be done."""
    if MEETING in os.environ or rank_info.world_size == 1:
        return None
    try:
        return Neighbour(store, rank_info)
    except OSError as error:
        log.warning("a rank that is lost is noticed later, as this one cannot look after its neighbour: %s", error)
        return None


class StoreGone(Exception):
    """The job's key-value store does not answer."""


class Watchdog:
    """Watches one rank, and answers when another rank calls the roll."""

    def __init__(
        self,
        meeting: Meeting,
        rank_info: RankInfo,
        activity: Activity,
        timeout: float,
        flights: Path | None = None,
    ) -> None:
        self.meeting, self.rank_info, self.activity, self.timeout = meeting, rank_info, activity, timeout
        self.flights = flights
        self.interval = between_looks(timeout, rank_info.world_size)
        self.patience = 3 * self.interval + 5  # seconds that a rank has to answer
        # Connections that no other thread waits on.
        self._store, self._hosts = (kept(store.clone()) for store in (meeting.store, meeting.hosts))  # type: ignore[attr-defined]
        self._next = _neighbour(self._hosts, rank_info)
        self._asker = ThreadPoolExecutor(1, f"{HIDDEN_PREFIX} store")
        self._told: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=HIDDEN_PREFIX, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._told.put(END)
        self._thread.join(self.interval)
        self._asker.shutdown(wait=False, cancel_futures=True)

    def give_up(self, error: BaseException) -> None:
        """End the process because a peer is lost. If the launcher notices that too, its message is the better one."""
        self.activity(f"lost a peer ({reason(error)})")
        if signal.SIGTERM in self.activity.asked:  # the launcher has noticed, and ends this rank too
            log.error("lost a peer: %s", error)
            os._exit(ExitCode.LOST_CONTACT)
        self._told.put(f"rank {self.rank_info.rank} has lost a peer: {reason(error)}")  # the roll is called meanwhile
        let_others_speak(ExitCode.LOST_CONTACT)
        self._thread.join()

    def _watch(self) -> None:
        number, quiet_until = 0, 0.0
        while True:
            cause: object = ""
            with suppress(queue.Empty):
                cause = self._told.get(timeout=self.interval)
            if cause is END:
                return
            try:
                call = RollCall(self._store, self.rank_info.world_size, number)
                doubt = self._ask(self._next.lost) if self._next is not None else ""
                stuck = self.activity.idle > self.timeout and time.monotonic() > quiet_until
                if not (cause or doubt or stuck or self._ask(call.called)):
                    continue
                verdict = self._take_part(call, str(cause), doubt)
            except StoreGone as gone:
                self._without_store(gone)
                return
            if verdict.fatal:
                self._end(verdict.text, verdict.speaker == self.rank_info.rank, partial(self._all_know, call, verdict))
            if self._next is not None:
                self._next.forgive()
            log.info("waiting, but some ranks get on: %s", verdict.text)
            number, quiet_until = number + 1, time.monotonic() + self.timeout - verdict.idle

    def _take_part(self, call: RollCall, cause: str, doubt: str) -> Verdict:
        self._ask(call.call, cause, doubt)
        status = self._status()
        concludes = self._ask(call.answer, status)
        deadline = time.monotonic() + self.patience
        if concludes:
            began, lost = time.monotonic(), self._ask(call.cause)
            launcher_speaks_until = began + LAUNCHER_LEAD if lost else 0.0
            # Who does not listen has ended. But a rank that is only in doubt may answer, and shows that it has not.
            believed_from = began if lost else began + ANSWER_LOOKS * self.interval
            while time.monotonic() < launcher_speaks_until or (
                time.monotonic() < deadline and not self._ask(self._all_heard, call, time.monotonic() >= believed_from)
            ):
                time.sleep(self.interval / 5)
            verdict: Verdict = self._ask(call.conclude, self.timeout, self._hosts)
            return verdict
        while time.monotonic() < deadline + self.patience:
            found: Verdict | None = self._ask(call.verdict)
            if found is not None:
                return found
            time.sleep(self.interval / 5)
        raise StoreGone("the rank that was to conclude a roll call is gone")

    def _all_heard(self, call: RollCall, believed: bool) -> bool:
        """Return whether all have answered, or with `believed` the others cannot: their processes have ended."""
        return call.complete() or (believed and self._next is not None and all_ended(self._hosts, call.missing()))

    def _status(self) -> Status:
        what, since = self.activity.now
        began = time.time() - (time.monotonic() - since)
        host, rank_info = self.meeting.host, self.rank_info
        flight: dict[str, Any] = {}
        try:
            flight = recorded(what.awaited if isinstance(what, Awaiting) else ()).to_json()
        except Exception as error:  # noqa: BLE001 - PyTorch may change its records; the roll goes on without them
            log.warning("no record of collectives: %s: %s", type(error).__name__, error)
        step, idle = self.activity.step, self.activity.idle
        return Status(rank_info.rank, host, step, str(what), began, idle, locations(), flight)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the store; a host that has lost its power does not even refuse."""
        try:
            return self._asker.submit(function, *args).result(SILENCE)
        except TimeoutError as error:
            raise StoreGone(f"no answer for {SILENCE:g} s") from error
        except RuntimeError as error:
            raise StoreGone(reason(error)) from error

    def _without_store(self, gone: StoreGone) -> None:
        """End the process: the keeper of the store is lost, unless the job has just ended."""
        rank_info, deputy = self.rank_info, self.rank_info.rank == self.meeting.deputy
        with suppress(queue.Empty):
            deadline = time.monotonic() + LAUNCHER_LEAD + (0 if deputy else DEPUTY_LEAD)
            while self._told.get(timeout=max(0.0, deadline - time.monotonic())) is not END:
                pass
            return
        text = f"lost the job's key-value store, which {self.meeting.keeper} kept: {gone}"
        # If the deputy is lost too, somebody of each node, whose words are not needed where the launcher has noticed.
        speaks = deputy or rank_info.local_rank < 2
        self._end(f"{text}\n  rank {rank_info.rank}: {self._status()}", speaks, lambda: None)

    def _all_know(self, call: RollCall, verdict: Verdict) -> None:
        """Wait until all ranks know the verdict: one that ends may end others, and rank 0 takes the store along."""
        deadline = time.monotonic() + EXIT_DELAY
        with suppress(StoreGone):
            known = self._ask(call.know)
            while known < verdict.answers and time.monotonic() < deadline:
                time.sleep(self.interval / 5)
                known = self._ask(call.known)
            if self.rank_info.rank == 0:
                time.sleep(self.interval / 2)

    def _end(self, text: str, speaks: bool, part: Callable[[], None]) -> None:
        status = self._status()
        log.error("%s\nhere: %s\n%s", text, status, stacks())
        if self.flights is not None:
            briefly(partial(keep, self.flights, asdict(status)))
        note_failure(ExitCode.LOST_CONTACT, text, self.rank_info, self.activity.step)
        if speaks:
            tell(ExitCode.LOST_CONTACT, text, self.rank_info)
        part()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ExitCode.LOST_CONTACT)
