"""A summary of a run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.texts import clock, lasting, printable, scaled, share, table
from ..base.verdict import First
from .summary import Summary

ACCOUNT_NAMES = {  # accounts, as people read them
    "training": "training",
    "saving": "standing still to save",
    "evaluating": "evaluating",
    "restarting": "restarting, to the first step",
    "lost": "lost: done again, or until a failure was noticed",
    "waiting": "waiting for a job",
}
ATTEMPTS, DECISIONS, NODES = 6, 5, 6  # latest ones that are shown


def steps_text(found: Summary) -> str:
    return f"{found['step']:,}" + (f" of {found['steps']:,}" if found["steps"] is not None else "")


def speed_text(found: Summary) -> str:
    """Loss, tokens per second, and the time of a step now and usually."""
    parts = []
    if found["loss"] is not None:
        parts.append(f"loss {found['loss']:.4f}")
    if found["valid_loss"] is not None:
        parts.append(f"valid loss {found['valid_loss']:.4f}")
    if found["tokens_per_second"] is not None:
        parts.append(scaled(found["tokens_per_second"], "tokens/s"))
    if found["step_seconds"] is not None:
        parts.append(f"a step {lasting(found['step_seconds'])} (usually {lasting(found['usual_step_seconds'])})")
    return ", ".join(parts)


def checkpoint_text(checkpoint: Mapping[str, Any]) -> str:
    if checkpoint["step"] is None:
        text = "none yet"
    else:
        text = f"step {checkpoint['step']:,}"
        if checkpoint["age"] is not None:
            text += f", {lasting(checkpoint['age'])} ago, {scaled(checkpoint['bytes'], 'B')}"
    if checkpoint["save_seconds"] is not None:
        text += f"; a save stops training for {lasting(checkpoint['save_seconds'])}"
    if checkpoint["write_seconds"] is not None:
        text += f", and is written in {lasting(checkpoint['write_seconds'])}"
    return text


def one_line(found: Summary) -> str:
    """The state of a run on one line, with the time."""
    parts = [clock(found["time"]), found["text"], f"step {steps_text(found)}"]
    if speed := speed_text(found):
        parts.append(speed)
    parts.append(f"goodput {share(found['goodput'])}")
    if found["eta"] is not None:
        parts.append(f"ETA {lasting(found['eta'])}")
    return "  ".join(parts)


def facts(found: Summary) -> list[tuple[str, str]]:
    """Facts of a run besides its state: pairs of a name and a text."""
    told = [("steps", steps_text(found) + (f", {found['lost_steps']:,} done again" if found["lost_steps"] else ""))]
    if speed := speed_text(found):
        told.append(("now", speed))
    if found["eta"] is not None:
        told.append(("ETA", f"{lasting(found['eta'])}, at {clock(found['time'] + found['eta'])}"))
    told.append(("checkpoint", checkpoint_text(found["checkpoint"])))
    if found["goodput"] is not None:
        without = f" ({share(found['goodput_without_waiting'])} without waiting for jobs)"
        told.append(("goodput", share(found["goodput"]) + f" of {lasting(found['wall'])}" + without))
    return told


def status_text(found: Summary) -> str:
    """Text of a run's status for a screen."""
    head = table(("", ""), [("state", found["text"]), *facts(found)], (0, 1))
    parts = [printable(found["run"]), head, _where(found)]
    parts += [_attempts(found), _nodes(found), _decisions(found)]
    return "\n\n".join(part for part in parts if part)


def _where(found: Summary) -> str:
    rows = [
        (text, lasting(found["accounts"][name]), f"{found['accounts'][name] / found['wall']:.1%}")
        for name, text in ACCOUNT_NAMES.items()
        if found["accounts"][name] > 0
    ]
    return table(("where time went", "", ""), rows) if rows else ""


def cause_text(attempt: Mapping[str, Any]) -> str:
    """Text on how an attempt ended, and its first failure."""
    if attempt["ended"] is None:
        return "goes on"
    text = str(attempt["cause"] or "ended, nobody has told how").replace("_", " ")
    first = attempt["first"]
    if first is not None:
        who = First(first["rank"], first["node"], first["text"])
        text += f": {who}" if str(who) else ""
    return text


def attempt_row(attempt: Mapping[str, Any], longest: int) -> tuple[str, ...]:
    """Name, begin, duration, nodes, first and last step, and how an attempt ended, in at most `longest` characters."""
    steps = ("–" if step is None else f"{step:,}" for step in (attempt["from_step"], attempt["to_step"]))
    nodes = str(len(attempt["nodes"]) or "–")
    began, took = clock(attempt["began"]), lasting(attempt["seconds"])
    return (attempt["name"], began, took, nodes, *steps, printable(cause_text(attempt), longest))


def _attempts(found: Summary) -> str:
    attempts = found["attempts"]
    if not attempts:
        return ""
    rows = [attempt_row(each, 90) for each in attempts[-ATTEMPTS:]]
    title = f"attempts: {len(attempts)}" + (f", the latest {ATTEMPTS}" if len(attempts) > ATTEMPTS else "")
    return table((title, "began", "took", "nodes", "from", "to", "how it ended"), rows, (0, 6))


def against(node: Mapping[str, Any]) -> str:
    """Text of the complaints about a node."""
    told = []
    if node["first_failures"]:
        told.append(f"first to fail {node['first_failures']} ×")
    if node["straggler"]:
        told.append(f"slow {node['straggler']} ×")
    if node["left_out"]:
        told.append(f"left out: {node['left_out']}")
    return ", ".join(told)


def _nodes(found: Summary) -> str:
    rows = [(node["node"], printable(against(node), 120)) for node in found["nodes"][:NODES]]
    return table(("hot nodes", ""), rows, (0, 1)) if rows else ""


def _decisions(found: Summary) -> str:
    latest = found["decisions"][-DECISIONS:]
    rows = [(clock(each["time"]), each["by"], printable(each["text"], 120)) for each in latest]
    return table(("latest decisions", "", ""), rows, (0, 1, 2)) if rows else ""
