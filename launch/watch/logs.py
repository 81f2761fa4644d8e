"""`megalite-logs`: the first failure of an attempt in context: who failed, where, what it said, what others did."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from ..base.arguments import count, natural
from ..base.errors import UserError
from ..base.events import Event, read_events
from ..base.files import opened
from ..base.line_files import number, whole
from ..base.outcome import DONE, Failure, read_failures, read_outcome
from ..base.run_folder import Attempt, RunFolder
from ..base.texts import clock, lasting, printable
from ..base.verdict import HEALTH_FAILURE, INPUT_ERROR, RETRIED_CAUSES, First
from .run import open_run

TAIL = 2**16  # bytes of the end of a log that are read
LINES, WIDTH = 15, 200  # lines of a log that are shown, and characters of each
PEERS = 5  # sayings of other ranks
POLL_SECONDS = 1.0  # seconds between two looks
SPEAKERS = ("supervisor", "launcher", "guard", "node")  # speakers that are no ranks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("megalite-logs", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run: run.dir/run.name")
    parser.add_argument("--attempt", metavar="ID", help="as 4711.0.2; default: the latest that has failed")
    parser.add_argument("--rank", type=natural, metavar="N", help="show the log of this rank, not of the first to fail")
    parser.add_argument("--lines", type=count, default=LINES, metavar="N", help=f"of the log (default {LINES})")
    parser.add_argument("--follow", action="store_true", help="go on with the log as it is written, until Ctrl-C")
    given = parser.parse_args(arguments)
    folder = open_run(given.run).folder
    events = _events(folder)
    attempt = _attempt(folder, events, given.attempt, follow=given.follow)
    log = _tell(folder, events, attempt, given.rank, given.lines)
    if given.follow and log is not None:
        for line in followed(log):
            print(line, flush=True)
    return DONE


def attempts_of(folder: RunFolder, events: Sequence[Event]) -> list[Attempt]:
    """All attempts that have left a folder or logs, in the order in which they began."""
    began: dict[Attempt, float] = {}
    for parent in (folder.attempts, folder.path / "logs"):
        try:
            paths = list(parent.iterdir())
        except OSError:
            continue
        for path in paths:
            name = Attempt.parse(path.name)
            if name is not None and path.is_dir():
                began[name] = min(began.get(name, float("inf")), path.stat().st_mtime)
    for event in events:
        name = Attempt.parse(str(event.get("attempt"))) if event["event"] == "attempt" else None
        if name is not None:
            began[name] = event["time"]
    return sorted(began, key=lambda name: (began[name], name))


def _attempt(folder: RunFolder, events: Sequence[Event], wanted: Optional[str], follow: bool) -> Optional[Attempt]:
    """The attempt to tell of; None where megalite has run without a supervisor. Raises UserError."""
    found = attempts_of(folder, events)
    if wanted is not None:
        name = Attempt.parse(wanted)
        if name is None or name not in found:
            known = ", ".join(map(str, found[-5:])) or "none"
            raise UserError(f"--attempt {printable(wanted)}: there is no such attempt; the latest are: {known}")
        return name
    if not follow:
        told = {event.get("attempt") for event in events if event["event"] == "attempt_ended" and _failed(event)}
        for name in reversed(found):
            if str(name) in told or read_failures(folder.attempt(name)):
                return name
    return found[-1] if found else None


def _failed(ended: Event) -> bool:
    return ended.get("cause") in (*RETRIED_CAUSES, INPUT_ERROR, HEALTH_FAILURE)


def _events(folder: RunFolder) -> list[Event]:
    try:
        return read_events(folder.events)
    except OSError:
        return []


def _tell(
    folder: RunFolder, events: Sequence[Event], attempt: Optional[Attempt], rank: Optional[int], lines: int
) -> Optional[Path]:
    """Print what is known. Returns the log that was shown."""
    failures = read_failures(folder.attempt(attempt)) if attempt is not None else []
    ended = _named(events, "attempt_ended", attempt) if attempt is not None else None
    seen = _seen(ended)
    first = _first(failures, seen)
    if attempt is not None:
        for line in _head(folder, events, attempt, first, ended):
            print(line)
    known = seen.rank if seen is not None else None
    shown = next((each for each in (rank, first.rank if first else None, known) if each is not None), 0)
    log = log_of(folder, attempt, shown)
    if log is None:
        where = printable(folder.logs(attempt) if attempt is not None else folder.path / "logs")
        print(f"\nthere is no log of rank {shown} in {where}")
    else:
        print(f"\nthe end of {printable(log)}:")
        for line in tail_of(log, lines):
            print(f"  {line}")
    others = [failure for failure in failures if first is None or failure.rank != first.rank]
    for line in _peers(others, first):
        print(line)
    return log


def _seen(ended: Optional[Event]) -> Optional[First]:
    """The first to fail as who looked after the ranks has told it; None if nobody has."""
    first = ended.get("first") if ended is not None else None
    if not isinstance(first, dict):
        return None
    node = first.get("node")
    return First(whole(first.get("rank")), str(node) if node else None, str(first.get("text") or ""))


def _first(failures: Sequence[Failure], seen: Optional[First]) -> Optional[Failure]:
    """The report of the first to fail: a rank that was killed has none, and those who missed it were not the first."""
    if seen is None or (seen.rank is None and seen.node is None):
        return failures[0] if failures else None
    return next((failure for failure in failures if failure.rank == seen.rank), None)


def _head(
    folder: RunFolder, events: Sequence[Event], attempt: Attempt, first: Optional[Failure], ended: Optional[Event]
) -> Iterator[str]:
    """The attempt, its first failure, and what ranks have found out about it."""
    began = _named(events, "attempt", attempt)
    nodes = began.get("nodes") if began is not None else None
    told = f"attempt {attempt}"
    if began is not None:
        told += f" began {clock(began['time'])}"
        told += f" on {printable(', '.join(map(str, nodes)), 100)}" if isinstance(nodes, list) else ""
    yield told
    outcome = read_outcome(folder.attempt(attempt))
    if ended is not None:
        yield _ended_text(ended)
    elif outcome is not None:
        yield f"ended {clock(outcome.time)} with exit code {outcome.code}, step {outcome.step:,} saved"
    else:
        yield "goes on, or nobody has told its end"
    seen = _seen(ended)
    if first is None and seen is not None and (seen.rank is not None or seen.node is not None):
        yield f"\nfirst to fail: {printable(seen, WIDTH)}; it could report nothing itself"
    elif first is None:
        yield "no rank has reported a failure" + (f"; {printable(seen, WIDTH)}" if seen is not None else "")
    else:
        yield ""
        step = f"in step {first.step:,}, " if first.step else ""
        where = f"rank {first.rank} on {printable(first.node, 64)}, {clock(first.time)}"
        yield f"first to fail: {where}, {step}exit code {first.code}"
        for line in first.text.splitlines()[:LINES] or ["it could not say why"]:
            yield f"  {printable(line, WIDTH)}"
    since = began["time"] if began is not None else float("-inf")
    until = ended["time"] if ended is not None else float("inf")
    for event in events:
        if since <= event["time"] <= until and event.get("by") not in SPEAKERS and _of(event, attempt):
            yield ""
            yield f"{clock(event['time'])} {printable(event.get('by'), 40)}, {printable(event['event'], 40)}:"
            for line in str(event.get("text", "")).splitlines()[:LINES]:
                yield f"  {printable(line, WIDTH)}"


def _ended_text(ended: Event) -> str:
    """Text on when and how an attempt has ended, without the first failure."""
    cause, code = printable(ended.get("cause"), 40).replace("_", " "), ended.get("code")
    seconds = number(ended.get("seconds"))
    told = f"ended {clock(ended['time'])}"
    told += f" after {lasting(seconds)}" if seconds is not None else ""
    told += f": {cause}" + (f", exit code {code}" if whole(code) is not None else "")
    before, after = whole(ended.get("from_step")), whole(ended.get("to_step"))
    if before is None or after is None:
        return told
    return f"{told}; " + (
        f"saved up to step {after:,}" if after > before else f"nothing was saved after step {before:,}"
    )


def _of(event: Event, attempt: Attempt) -> bool:
    return event.get("attempt") in (None, str(attempt))


def _named(events: Sequence[Event], kind: str, attempt: Attempt) -> Optional[Event]:
    """The latest event of a kind about an attempt."""
    found = [event for event in events if event["event"] == kind and event.get("attempt") == str(attempt)]
    return found[-1] if found else None


def _peers(others: Sequence[Failure], first: Optional[Failure]) -> Iterator[str]:
    """Yield reports of other ranks: ranks with the same report together, the earliest first."""
    sayings: dict[tuple[int, str], list[Failure]] = {}
    for failure in others:
        sayings.setdefault((failure.code, failure.text), []).append(failure)
    if sayings:
        yield f"\n{'others' if first is not None else 'ranks'}: {len(others)} reported a failure"
    for (code, text), failures in list(sayings.items())[:PEERS]:
        ranks = ", ".join(str(failure.rank) for failure in failures[:8]) + (", …" if len(failures) > 8 else "")
        nodes = ", ".join(sorted({printable(failure.node, 64) for failure in failures})[:4])
        late = f", {failures[0].time - first.time:+.1f} s" if first is not None else ""
        said = printable(text.replace("\n", " / "), WIDTH) or "no reason given"
        yield f"  {'rank' if len(failures) == 1 else 'ranks'} {ranks} on {nodes}, code {code}{late}: {said}"
    if len(sayings) > PEERS:
        yield f"  and {len(sayings) - PEERS} other reasons"


def log_of(folder: RunFolder, attempt: Optional[Attempt], rank: int) -> Optional[Path]:
    """The log of a rank; None if there is none."""
    where = folder.logs(attempt) if attempt is not None else folder.path / "logs"
    name = re.compile(rf"(.*-|rank_)0*{rank}\.log")
    for parent in (where, folder.path / "logs"):
        try:
            found = sorted(path for path in parent.iterdir() if name.fullmatch(path.name))
        except OSError:
            continue
        if found:
            return found[0]
    return None


def tail_of(path: Path, lines: int) -> list[str]:
    """The last lines of a log, printable and cut."""
    try:
        with open(opened(path, os.O_RDONLY), "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL, 0))
            text = file.read(TAIL)
    except OSError as error:
        return [f"(it cannot be read: {error.strerror})"]
    # A bar of progress overwrites its line: what it showed last is what people saw.
    whole = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n")]
    kept = [line for line in whole if line.strip()][-lines:]
    return [_shown(line) for line in kept] or ["(it is empty)"]


def _shown(line: bytes) -> str:
    return printable(line[: 8 * WIDTH].decode(errors="replace"), WIDTH)


def followed(path: Path) -> Iterator[str]:
    """The lines that are added to a log from now on."""
    try:
        at = path.stat().st_size
    except OSError:
        return
    rest = b""
    while True:
        try:
            size = path.stat().st_size
            if size < at:
                at, rest = 0, b""
            with open(opened(path, os.O_RDONLY), "rb") as file:
                file.seek(at)
                chunk = file.read(TAIL)
        except OSError:
            chunk = b""
        at += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(_shown, lines)
        if len(rest) > TAIL:  # a line without an end
            yield _shown(rest)
            rest = b""
        if not chunk:
            time.sleep(POLL_SECONDS)
