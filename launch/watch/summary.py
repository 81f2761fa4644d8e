"""Summary of a run for people and programs: numbers and sentences, ready for JSON. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, Optional

from ..base.texts import lasting
from .ledger import ACCOUNTS, RESTARTING, SECOND, TRAINING, WAITING, AttemptSpan
from .run import Watched

RECENT_REPORTS = 200  # latest reports of which the usual step time is the median
QUIET_SECONDS, QUIET_STEPS = 120.0, 10  # a run is silent after so many seconds, and so many usual reports
START_SECONDS = 900.0  # seconds for which a start may be silent: it compiles, loads and checks nodes
MAX_LISTED_NODES = 20
ORDERED_ACCOUNTS = sorted(ACCOUNTS, key=lambda name: name != RESTARTING)  # an attempt begins with its restart
Summary = dict[str, Any]


@dataclass(frozen=True)
class State:
    """State of a run. living: time goes on for it; over: nothing more is to come."""

    name: str
    text: str
    living: bool
    over: bool = False


def state_of(run: Watched) -> State:
    """State of a run by its latest lines; docs/watching.md has the rules."""
    ledger = run.ledger
    if run.over is not None:
        code, reason = run.over
        name = {0: "finished", 3: "stopped", 130: "stopped"}.get(code, "failed")
        return State(name, f"{name}: {reason}" if reason else name, False, True)
    if ledger.began is None:
        return State("unknown", "nothing has been reported yet", False)
    if not run.supervised and run.ended:
        name = {"done": "finished"}.get(run.ended, run.ended)
        return State(name, f"{name}: {run.reason}" if run.reason else name, False, True)
    if ledger.phase == "queue" or (ledger.phase == "ended" and not ledger.job_on):
        return State("waiting", "waiting in the queue", True)
    silent = max(run.now - ledger.sign / SECOND, 0.0)
    usual = ledger.usual / SECOND * run.report_steps
    if ledger.phase == "training" and not run.ended:
        saving = run.saves.under_way is not None or run.partial() is not None
        if silent > max(QUIET_SECONDS, QUIET_STEPS * usual):
            return State("silent", f"silent for {lasting(silent)}", False)
        if saving and silent > 2 * usual:
            return State("saving", "saving", True)
        return State("running", "running; a checkpoint is being written" if saving else "running", True)
    if silent > START_SECONDS:
        return State("silent", f"silent for {lasting(silent)}", False)
    if ledger.phase == "ended":
        told = "training has stopped" if run.ended in ("stopped", "done") else "an attempt has ended"
        return State("starting", f"{told}, and what comes next is not told yet", True)
    return State("starting", "starting: no step has been made yet", True)


def summary(run: Watched) -> Summary:
    """Return all facts of a run for people and programs. Unknown numbers are None."""
    state, ledger = state_of(run), run.ledger
    checkpoint = run.newest_checkpoint()
    spent, end = ledger.accounts(int(run.now * SECOND), state.living, checkpoint or 0)
    wall = (end - ledger.began) / SECOND if ledger.began is not None else 0.0
    accounts = {name: spent[name] / SECOND for name in ACCOUNTS}
    working = wall - accounts[WAITING]
    goodput = accounts[TRAINING] / wall if wall else None
    effective = accounts[TRAINING] / working if working else None
    recent = [seconds for seconds in ledger.seconds[-RECENT_REPORTS:] if seconds == seconds]
    usual = median(recent) if recent else None
    left = max(run.steps - ledger.step, 0) if run.steps is not None else None
    eta = None
    if usual is not None and left is not None and effective and not state.over:
        eta = left * usual / max(effective, 0.01)
    failures, rank_hours = run.interruptions(end / SECOND)
    return {
        "run": str(run.folder.path),
        "time": run.now,
        "state": state.name,
        "text": state.text,
        "over": state.over,
        "began": None if ledger.began is None else ledger.began / SECOND,
        "wall": wall,
        "accounts": accounts,
        "goodput": goodput,
        "goodput_without_waiting": effective,
        "step": ledger.step,
        "steps": run.steps,
        "ranks": run.ranks,
        "lost_steps": ledger.lost_steps,
        "loss": run.loss if recent and isfinite(run.loss) else None,
        "valid_loss": run.valid[-1][1] if run.valid else None,
        "tokens_per_second": run.tokens_per_second or None,
        "step_seconds": run.step_seconds if recent else None,
        "usual_step_seconds": usual,
        "eta": eta,
        "checkpoint": _checkpoint(run, checkpoint),
        "failures": failures,
        "rank_hours": rank_hours,
        "attempts": [_attempt(part, end) for part in ledger.parts],
        "nodes": _nodes(run),
        "decisions": [{"time": time, "by": by, "text": text} for time, by, text in run.decisions],
    }


def _checkpoint(run: Watched, newest: Optional[int]) -> Summary:
    saves = run.saves
    told = newest is not None and newest == saves.step
    return {
        "step": newest,
        "age": max(run.now - saves.time, 0.0) if told else None,
        "bytes": saves.bytes if told else None,
        "save_seconds": median(saves.blocked) if saves.blocked else None,
        "write_seconds": median(saves.written) if saves.written else None,
        "under_way": saves.under_way,
    }


def _attempt(part: AttemptSpan, end: int) -> Summary:
    return {
        "name": part.name,
        "began": part.began / SECOND,
        "ended": None if part.ended is None else part.ended / SECOND,
        "seconds": ((end if part.ended is None else part.ended) - part.began) / SECOND,
        "cause": part.cause or None,
        "code": part.code,
        "first": part.first,
        "nodes": part.nodes,
        "ranks": part.ranks or None,
        "from_step": part.from_step,
        "to_step": part.to_step,
        "accounts": {name: part.spent[name] / SECOND for name in ORDERED_ACCOUNTS if part.spent[name]},
    }


def _nodes(run: Watched) -> list[Summary]:
    """Nodes that something is known against, the worst first."""
    hot = sorted(run.nodes.items(), key=lambda item: (item[1].heat, item[0]), reverse=True)
    return [
        {"node": name, "first_failures": node.first, "straggler": node.slow, "left_out": node.left_out or node.bad}
        for name, node in hot
        if any(node.heat)
    ][:MAX_LISTED_NODES]
