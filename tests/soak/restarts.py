"""From a killed rank to training again, phase by phase: `megalite train` under the supervisor, here and on a Slurm.

One of two ranks is killed with SIGKILL, again and again. Every phase ends when the last rank has done it.
"""

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import supervised_job
import timed_train
from campaign import write_inputs
from slurm_cluster import Cluster, missing

from megalite.base.stop_signals import listen, stop
from megalite_launch.base.events import Event, read_events
from megalite_launch.base.outcome import read_failures
from megalite_launch.base.run_folder import RunFolder

PATIENCE = 120.0
RANKS = 2
PHASES = {  # what is done at the end of each
    "noticed": "the kill is noticed by the other rank",
    "ended": "all ranks are gone, and the supervisor knows it",
    "attempt": "it has looked at the nodes and starts ranks",
    "started": "the processes are there",
    "imported": "configuration checked, PyTorch imported",
    "met": "the ranks have met",
    "checked": "process groups, the data checked",
    "built": "mesh and model",
    "loaded": "the newest checkpoint is loaded",
    "stepped": "the first step is recorded",
}
COMMAND = (sys.executable, timed_train.__file__, "train")


def main() -> int:
    parser = argparse.ArgumentParser("restarts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="each way (default: 5)")
    parser.add_argument("--only", choices=("local", "slurm"))
    options = parser.parse_args()
    listen(stop)  # an exception, so that no daemon outlives this
    rows: dict[str, list[dict[str, float]]] = {}
    for way, running in (("local", _locally), ("slurm", _on_slurm)):
        if options.only not in (None, way) or (way == "slurm" and missing()):
            continue
        with tempfile.TemporaryDirectory(prefix="megalite-restarts-") as folder:
            os.environ[timed_train.NOTES] = f"{folder}/notes.jsonl"
            with running(Path(folder)) as run:
                rows[way] = [_kill(run, folder, number) for number in range(options.kills)]
    print(_table(rows))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return 0


@contextmanager
def _locally(folder: Path) -> Iterator[RunFolder]:
    write_inputs(folder)
    how = ("--backend", "local", "--run", str(folder / "run"), "--ranks-per-node", str(RANKS))
    command = [sys.executable, "-m", "megalite_launch", "supervise", *how, "--", *COMMAND, "config.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [*command, f"parallel.dp_shard={RANKS}"], cwd=folder, env=environment, stdout=log, stderr=log
        ) as supervisor,
    ):
        try:
            yield RunFolder(folder / "run")
        finally:
            supervisor.terminate()
            try:
                supervisor.wait(30)
            finally:
                supervisor.kill()


@contextmanager
def _on_slurm(folder: Path) -> Iterator[RunFolder]:
    write_inputs(folder)
    check = shlex.join([*COMMAND, "--check", "--world-size", "{ranks}", "config.yaml"])
    with Cluster(folder, os.environ | {"OMP_NUM_THREADS": "1"}) as cluster:
        case = supervised_job.submit(
            cluster,
            "run",
            "config.yaml",
            command=COMMAND,
            run=folder / "run",
            supervisor=("--check", check, "--ranks-per-node", "1", "--max-strikes", "1000"),
            sbatch=(f"--chdir={folder}",),
        )
        yield RunFolder(case.run)


def _kill(run: RunFolder, folder: str, number: int) -> dict[str, float]:
    """Kill a rank while steps are made; when each of `PHASES` was over, in seconds from the kill."""
    before = run.newest_step()
    _until(lambda: run.newest_step() > before and _stepped(run, 0) > 0, "a checkpoint")
    attempt = _attempts(run)[-1]
    folder_of = run.attempts / str(attempt["attempt"])
    rank = number % RANKS
    time.sleep(random.Random(number).uniform(0, 1))
    victim = [line["process"] for line in _notes(folder) if line["what"] == "loaded" and line["rank"] == str(rank)][-1]
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    _until(lambda: len(_attempts(run)) > 0 and _attempts(run)[-1]["time"] > killed, "another attempt")
    again = float(_attempts(run)[-1]["time"])
    _until(lambda: _stepped(run, again) > 0, "a step")
    ended = [float(event["time"]) for event in read_events(run.events) if event["event"] == "attempt_ended"][-1]
    moments = {"noticed": min((found.time for found in read_failures(folder_of)), default=ended), "ended": ended}
    moments |= {"attempt": again, "stepped": _stepped(run, again)}
    notes = [line for line in _notes(folder) if line["time"] > killed]
    for what in PHASES.keys() - moments.keys():
        moments[what] = max(line["time"] for line in notes if line["what"] == what)
    found = {what: moments[what] - killed for what in PHASES}
    print(" ".join(f"{what} {seconds:.2f}" for what, seconds in found.items()), file=sys.stderr, flush=True)
    return found


def _attempts(run: RunFolder) -> list[Event]:
    return [event for event in read_events(run.events) if event["event"] == "attempt"]


def _stepped(run: RunFolder, since: float) -> float:
    """When the first step after a moment was recorded; 0: none was."""
    if not run.metrics.exists():
        return 0.0
    lines = run.metrics.read_text().rpartition("\n")[0].splitlines()
    times = (line["time"] for line in map(json.loads, lines[-400:]) if "event" not in line)
    return min((moment for moment in times if moment > since), default=0.0)


def _until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"restarts: never saw {what}")
        time.sleep(0.02)


def _notes(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "notes.jsonl").read_text().splitlines()]


def _table(rows: dict[str, Sequence[dict[str, float]]]) -> str:
    ways = list(rows)
    lines = ["| when | " + " | ".join(f"{way}: median s | longest s" for way in ways) + " |"]
    lines += ["|---" * (1 + 2 * len(ways)) + "|"]
    for phase, text in PHASES.items():
        cells = [
            cell
            for way in ways
            for cell in (
                f"{statistics.median(found[phase] for found in rows[way]):.1f}",
                f"{max(found[phase] for found in rows[way]):.1f}",
            )
        ]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
