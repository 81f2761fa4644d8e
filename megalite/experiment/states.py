"""Finds the state of a run from its files. Only these files, never a scheduler, can show that a run is done."""

import re
from pathlib import Path
from typing import Any

from megalite.base.files import is_file
from megalite.experiment.folder import Status
from megalite.train.folder.records import RETURN_EVENTS
from megalite_launch.base.events import Event, read_events
from megalite_launch.base.line_files import parsed
from megalite_launch.base.outcome import BAD_INPUT, DONE, INTERRUPTED, STOPPED, UNHEALTHY
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.verdict import HEALTH_FAILURE

TAIL = 1 << 16  # bytes at the end of metrics.jsonl that tell how far a run is
MEMORY = re.compile(
    r"out[ -]of[ -]memory|OutOfMemory|OUT_OF_MEMORY|oom[ -_]kill|can('t|not) allocate memory|MemoryError",
    re.IGNORECASE,
)
SAVE_PROBLEM = re.compile(r"could not be written|it is not saved|cannot be written to")  # not of training
SIGNAL_BASE = 128  # with exit codes above, a signal has ended a process
FOLDER_LOSS = "its folder was removed or could not be written to"
REQUEUE_REASON = "Slurm starts it again"
MAX_REASON_LENGTH = 300  # characters


def reached(run: Path, steps: int, evaluates: bool) -> tuple[int, bool]:
    """The last step that a run has recorded, and whether it is done.

    It is done when the last row of metrics.jsonl is of step `steps`; where it evaluates, one with the validation loss.
    Rows after which the run went back do not count.
    """
    step, trained, evaluated = 0, 0, 0
    for line in _tail(run / "metrics.jsonl"):
        at = line.get("step")
        if not isinstance(at, int):
            continue
        if line.get("event") in RETURN_EVENTS:
            step, trained, evaluated = min(step, at), min(trained, at), min(evaluated, at)
        elif "event" not in line:
            step = max(step, at)
            trained = at if "loss" in line else trained
            evaluated = at if "valid_loss" in line else evaluated
    return step, trained >= steps and (evaluated >= steps or not evaluates)


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON objects; none of a file that is not there."""
    if not is_file(path):  # a pipe that nobody writes to would be waited for
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            text = file.read(TAIL)
    except OSError:
        return []
    # Half a line, at the beginning of what was read or at its end, is none.
    return [found for line in text.splitlines() if (found := parsed(line)) is not None]


def standing(run: Path, status: Status) -> tuple[Status, int]:
    """The status of a run whose files are looked at now, and the step that it has reached."""
    step, done = reached(run, status.steps, status.evaluates)
    if done and status.state != "done":
        status = status.now("done", code=DONE)
    elif status.state == "done" and not done:
        status = status.now("planned", f"metrics.jsonl has reached step {step} of {status.steps} only")
    return status, step


def ended(run: Path, status: Status, code: int, timed_out: bool) -> Status:
    """The status of a run whose supervisor has ended with exit code `code`.

    timed_out: it was asked to stop since its time was over.
    """
    step, done = reached(run, status.steps, status.evaluates)
    if done:
        return status.now("done", code=DONE)
    events = _events(run)
    cause, said = _last_attempt(events)
    known = {"code": code}
    if events and events[-1]["event"] == "requeue":
        return status.now("submitted", REQUEUE_REASON, **known)
    if timed_out or cause == "timeout":
        return status.now("timeout", f"its time was over at step {step} of {status.steps}", **known)
    if MEMORY.search(said):
        return status.now("oom", _short(said), **known)
    if code == UNHEALTHY:  # the supervisor's too, where the folder of the run was removed or cannot be written to
        diverged = cause == HEALTH_FAILURE and not SAVE_PROBLEM.search(said)
        return status.now(
            "diverged" if diverged else "failed", _short(said if cause == HEALTH_FAILURE else FOLDER_LOSS), **known
        )
    if code in (STOPPED, INTERRUPTED):
        return status.now("planned", f"stopped at step {step} of {status.steps}, and goes on from there", **known)
    if code > SIGNAL_BASE:
        told = f"its supervisor was killed at step {step} of {status.steps}; often for want of memory"
        return status.now("failed", told, **known)
    if code == DONE:
        told = f"ended with 0, but metrics.jsonl has reached step {step} of {status.steps} only"
        return status.now("failed", told, **known)
    what = "bad input: " if code == BAD_INPUT else ""
    return status.now("failed", _short(f"{what}{said}" if said else f"exit code {code}; see logs/sweep.log"), **known)


def _events(run: Path) -> list[Event]:
    try:
        return read_events(RunFolder(run).events)
    except OSError:
        return []


def _last_attempt(events: list[Event]) -> tuple[str, str]:
    """The cause of the end of the last attempt, and the words of the first rank to fail."""
    for event in reversed(events):
        if event["event"] in ("attempt_ended", "refused"):
            first = event.get("first")
            said = first.get("text") if isinstance(first, dict) else event.get("text")
            return str(event.get("cause", "")), str(said or "")
    return "", ""


def _short(text: str) -> str:
    """The end of a text, on one line: of a traceback, that is the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    shown = lines[-1] if any("Traceback" in line for line in lines) else " ".join(lines)
    return shown if len(shown) <= MAX_REASON_LENGTH else shown[:MAX_REASON_LENGTH] + " …"
