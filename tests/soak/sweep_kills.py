"""The kill test of experiments: launchers, runners, supervisors and runs are killed at random, and nothing may be lost.

A ladder whose runs only pretend to train (tests/experiment/fake_megalite.py) is launched again and again, now and then
by two launchers at once. At random moments a process of it gets SIGKILL, or the launcher Ctrl-C. At the end every run
is done, none was started again after it was done, and each has recorded every one of its steps.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiment"))

from faked import Faked
from rich.console import Console

MARK = "MEGALITE_SWEEP_KILLS"
PARTS = {  # what is killed: words of its command line
    "launcher": ("experiment.sweep", "launch"),
    "runner": ("megalite.experiment.runner",),
    "supervisor": ("supervise",),
    "run": ("fake_megalite.py",),
}
WEIGHTS = (0.3, 0.2, 0.2, 0.3)  # how often each is killed
LADDER = {
    "experiment": {"kind": "ladder", "seeds": [0, 1, 2]},
    "rungs": {"a": {"model": {"width": 16}}, "b": {"model": {"width": 32}}, "c": {"model": {"width": 64}}},
    "trunk": {"decay": 0.25},
    "launch": {"parallel": 4, "attempts": 3},
}
STEP_TOKENS = 32
AGAIN = ("--only", "planned,failed")  # a run that is killed three times in a row has failed


class Lost(Exception):
    """What was lost, or done twice."""


def soak(folder: Path, kills: int, steps: Sequence[int], seed: int, say: object = print) -> Counter[str]:
    """Kill `kills` times. Returns how often each part was killed. Raises Lost."""
    source = random.Random(seed)
    budgets = [count * STEP_TOKENS for count in steps]
    faked = Faked(folder, {"seconds": 0.05}, **LADDER, tokens=budgets)
    faked.environment[MARK] = str(folder)
    counts: Counter[str] = Counter()
    while sum(counts.values()) < kills:
        launchers = [_launched(faked) for _ in range(2 if source.random() < 0.2 else 1)]
        while any(each.poll() is None for each in launchers) and sum(counts.values()) < kills:
            wanted = source.choices(list(PARTS), WEIGHTS)[0]
            if (part := _kill_one(faked.folder, wanted, source, launchers)) is not None:
                counts[part] += 1
                callable(say) and say(f"{sum(counts.values())} of {kills}: {part}")
        if all(each.poll() is not None for each in launchers) and _all_done(faked) and sum(counts.values()) < kills:
            budgets.append(budgets[-1] + 8 * STEP_TOKENS)  # all is done: the experiment grows
            faked.write(**LADDER, tokens=budgets)
    for each in launchers:
        each.wait(timeout=300)
    for _ in range(5):
        if _all_done(faked):
            break
        _launched(faked).wait(timeout=300)
    _check(faked, len(budgets))
    return counts


def _launched(faked: Faked) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        faked.command("launch", *AGAIN),
        cwd=faked.folder,
        env=faked.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill_one(
    folder: Path, wanted: str, source: random.Random, launchers: Sequence[subprocess.Popen[bytes]]
) -> str | None:
    """Wait for a process of a kind, and some time more, and kill it. Returns what it was; None if there is none."""
    while any(each.poll() is None for each in launchers) and not _processes(folder).get("run"):
        time.sleep(0.02)  # else a busy machine would have launchers killed before they have begun
    time.sleep(source.uniform(0.0, 0.8))
    found = _processes(folder).get(wanted, [])
    if not found:
        return None
    interrupts = wanted == "launcher" and source.random() < 0.5
    with suppress(ProcessLookupError):
        os.kill(source.choice(sorted(found)), signal.SIGINT if interrupts else signal.SIGKILL)
        return f"{wanted}, Ctrl-C" if interrupts else wanted
    return None


def _processes(folder: Path) -> dict[str, list[int]]:
    """The processes of the experiment, by what they are."""
    found: dict[str, list[int]] = {}
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                part = [name for name, marks in PARTS.items() if all(word in words for word in marks)]
                if part:
                    found.setdefault(part[-1], []).append(int(entry.name))
    return found


def _all_done(faked: Faked) -> bool:
    faked_states = set(faked.states().values())
    return faked_states == {"done"}


def _check(faked: Faked, budgets: int) -> None:
    """Raises Lost."""
    statuses = faked.statuses()
    not_done = {slug: status["state"] for slug, status in statuses.items() if status["state"] != "done"}
    if not_done:
        raise Lost(f"not done: {not_done}")
    if len(statuses) != 3 * 3 * budgets:
        raise Lost(f"{len(statuses)} runs of {9 * budgets}")
    if again := faked.run_again():
        raise Lost(f"run again after they were done: {again}")
    for path in (faked.folder / "experiments" / "exp" / "runs").glob("*/metrics.jsonl"):
        status = json.loads((path.parent / "status.json").read_text())
        steps: list[int] = []
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if record.get("event") == "resumed":
                    steps = [step for step in steps if step <= record["step"]]
                else:
                    steps.append(record["step"])
        whole = list(range(status["start"] + 1, status["steps"] + 1))
        if steps not in (whole, list(range(1, status["steps"] + 1))):
            raise Lost(f"{path}: has recorded the steps {steps}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 24, 48])
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            counts = soak(Path(folder), options.kills, options.steps, options.seed, console.print)
        except Lost as lost:
            console.print(f"LOST: {lost}", markup=False)
            return 1
    console.print(f"{sum(counts.values())} kills: {dict(counts)}; no run was lost, none was done again", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
