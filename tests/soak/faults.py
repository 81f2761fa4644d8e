"""The fault test: one run under the supervisor, on two nodes of a real Slurm, with faults at random.

All daemons of Slurm run on this machine. The ranks are stand-ins for training (tests/launch/stand_in.py): they step,
save, resume, obey signals and miss each other as megalite's ranks do, but import no torch, so that what is timed is the
supervisor and Slurm. The state of every step follows from the one before. After each fault the run must record a new
step and save a newer checkpoint by itself, and its curve must in the end be that of a run left alone. Nothing
may be left of it but files, and a cancelled job must not come back.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import stand_in
import supervised_job
from slurm_cluster import NODES, Cluster, missing
from supervised_job import Case

from megalite.config.files import write_whole
from megalite_launch.layout import RunFolder
from megalite_tools.bench.machine import cpu_name

PATIENCE = 180.0  # seconds in which a run must have recovered
GUARD = 6
Fault = Callable[["Campaign"], None]


@dataclass
class Record:
    """A fault that the run has recovered from."""

    fault: str
    seconds: float
    causes: list[str]


class Campaign:
    """One run and what befalls it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.records: list[Record] = []
        tools = cluster.folder / "tools"
        tools.mkdir()
        self.broken = tools / "broken"
        for name in ("scontrol", "squeue"):
            text = f"#!/bin/sh\n[ ! -e '{self.broken}' ] || exit 1\nexec /usr/bin/{name} \"$@\"\n"
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        how = ("--min-nodes", "1", "--guard-seconds", str(GUARD), "--preflight-seconds", "3", "--max-strikes", "1000")
        endless = ("--steps", "100000000", "--pause", "0.1")
        self.case: Case = supervised_job.submit(cluster, "run", *endless, supervisor=how, path=f"{tools}:")
        self.folder = RunFolder(self.case.run)

    def recover(self, since: float) -> float:
        """Seconds from the fault to a step of an attempt that began after it. Then waits for a newer checkpoint."""
        began = time.monotonic()
        attempt = self.newest_attempt(since)
        while attempt is None or not self.resumed(attempt):
            if time.monotonic() - began > PATIENCE:
                raise SystemExit(f"faults: the run has not recovered:\n{self.case.log[-4000:]}")
            time.sleep(0.05)
            attempt = self.newest_attempt(since)
        took, step = time.time() - since, self.folder.newest_step()
        self.case.until(lambda: self.folder.newest_step() > step, "a newer checkpoint", PATIENCE)
        return took

    def newest_attempt(self, since: float) -> float | None:
        times = [event["time"] for event in self.case.all("attempt") if event["time"] > since]
        return max(times, default=None)

    def resumed(self, since: float) -> bool:
        last = json.loads(self.case.run.joinpath("metrics.jsonl").read_text().splitlines()[-1])
        return "step" in last and "event" not in last and last["time"] > since

    def rank(self) -> tuple[int, int]:
        """A rank of the attempt under way, and its process id. Waits for one: an attempt may just be beginning."""
        deadline = time.monotonic() + PATIENCE
        while True:
            chosen = self.random.randrange(self.case.all("attempt")[-1]["ranks"])
            try:
                return chosen, self.case.ranks(chosen)
            except LookupError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def kill_a_rank(run: Campaign) -> None:
    os.kill(run.rank()[1], signal.SIGKILL)


def stop_a_rank(run: Campaign) -> None:
    os.kill(run.rank()[1], signal.SIGSTOP)


def _fail(run: Campaign, how: str) -> None:
    path = run.case.run / f"fail-{run.rank()[0]}"
    path.with_suffix(".part").write_text(how)
    path.with_suffix(".part").rename(path)


def fail(run: Campaign) -> None:
    _fail(run, "1")


def fail_and_spin(run: Campaign) -> None:
    _fail(run, "1 spin")


def signal_to_the_ranks(run: Campaign) -> None:
    run.cluster.run("scancel", "--signal=USR1", run.case.job)


def signal_to_the_script(run: Campaign) -> None:
    run.cluster.run("scancel", "--batch", f"--signal={run.random.choice(('USR1', 'TERM', 'USR2'))}", run.case.job)


def requeue_by_hand(run: Campaign) -> None:
    run.cluster.run("scontrol", "requeue", run.case.job)


def preempt(run: Campaign) -> None:
    high = ("-phigh", "-N2", "--exclusive", "--wrap=sleep 1", f"--output={run.cluster.folder}/high.log")
    run.cluster.run("sbatch", "--parsable", *high)


def stop_while_slurm_fails(run: Campaign) -> None:
    run.broken.touch()
    signal_to_the_ranks(run)
    run.case.until(lambda: bool(run.case.all("attempt_ended")), "an end")
    time.sleep(3)
    run.broken.unlink()


def freeze_a_node(run: Campaign) -> None:
    """The last one, until the run goes on without it. Then the job is requeued by hand to have it back."""
    since = time.time()
    processes = run.cluster.freeze(NODES[1])
    run.case.until(lambda: run.newest_attempt(since) is not None, "an attempt without the node", PATIENCE)
    run.cluster.thaw(processes)


def lose_the_batch_host(run: Campaign) -> None:
    run.cluster.crash(NODES[0])
    run.case.until(lambda: run.cluster.job(run.case.job)["JobState"] != "RUNNING", "the guard's requeue", PATIENCE)
    run.cluster.revive(NODES[0])


def freeze_the_batch_host(run: Campaign) -> None:
    guards = len(run.case.all("guard"))
    processes = run.cluster.freeze(NODES[0])
    run.case.until(lambda: len(run.case.all("guard")) > guards, "the guard's requeue", PATIENCE)
    time.sleep(1)
    run.cluster.thaw(processes)


WEIGHTS: dict[Fault, int] = {
    kill_a_rank: 14,
    stop_a_rank: 8,
    fail: 10,
    fail_and_spin: 8,
    signal_to_the_ranks: 6,
    signal_to_the_script: 6,
    requeue_by_hand: 3,
    preempt: 3,
    stop_while_slurm_fails: 3,
    freeze_a_node: 3,
    lose_the_batch_host: 2,
    freeze_the_batch_host: 2,
}


def campaign(run: Campaign, count: int, deadline: float) -> None:
    """Have every kind befall the run, in a random order, and as many more as there is time for."""
    weights = list(WEIGHTS.values())
    faults = list(WEIGHTS) + run.random.choices(list(WEIGHTS), weights, k=max(0, count - len(WEIGHTS)))
    run.random.shuffle(faults)
    run.case.trains()
    for number, fault in enumerate(faults):
        if time.monotonic() > deadline:
            print(f"faults: out of time after {number}", file=sys.stderr)
            return
        if len(run.case.all("attempt")[-1]["nodes"]) < 2:  # a node was frozen; have it back before the next fault
            run.cluster.until(
                lambda: run.cluster.run("sinfo", "-h", "-o", "%T").find("down") < 0, "all nodes", PATIENCE
            )
            since = time.time()
            requeue_by_hand(run)
            run.recover(since)
        time.sleep(run.random.uniform(0, 1))
        seen, since = len(run.case.all("attempt_ended")), time.time()
        fault(run)
        seconds = run.recover(since)
        causes = [event["cause"] for event in run.case.all("attempt_ended")[seen:]]
        run.records.append(Record(fault.__name__, seconds, causes))
        print(f"{number + 1:3} {fault.__name__:24} {seconds:6.1f} s  {' '.join(causes)}", file=sys.stderr, flush=True)


NOTES = """\
Seconds are from the fault to the next recorded step of an attempt that began after it. Ranks notice a silent peer after
{lost:.0f} s, what does not end is reaped 3 s later, and the guard waits {guard} s. A requeued job waits 6 s for Slurm
(`cred_expire=5`; 121 s by default), a preempted one for the other job too. For a frozen node it is the way to the same
run on the node that is left; for a batch host, `SlurmdTimeout` (10 s) and its return are in it.

{cpu}, {cores} cores, shared with other work; Slurm {slurm}.
"""


def page(run: Campaign, command: str, seconds: float, steps: int) -> str:
    rows = []
    for fault in WEIGHTS:
        found = [record for record in run.records if record.fault == fault.__name__]
        if found:
            times = [record.seconds for record in found]
            causes = sorted({cause for record in found for cause in record.causes})
            told = f"{statistics.median(times):.1f} | {max(times):.1f} | {', '.join(causes) or '–'}"
            rows.append(f"| {fault.__name__.replace('_', ' ')} | {len(found)} | {told} |")
    kinds = ("attempt", "requeue", "reaped", "guard", "left_out")
    counts = ", ".join(f"{len(run.case.all(kind))} {kind}" for kind in kinds)
    slurm = run.cluster.run("sinfo", "--version").split()[-1]
    lines = [
        "# The fault test",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().split("\n"),
        "",
        f"    {command}",
        "",
        f"{len(run.records)} faults over one run of {steps} recorded steps, in {seconds:.0f} s; events: {counts}.",
        "The curve is that of an undisturbed run, the job stayed cancelled, and no process was left.",
        "",
        "| fault | times | median s | longest s | attempts ended as |",
        "|---|---|---|---|---|",
        *rows,
        "",
        NOTES.format(lost=stand_in.LOST, guard=GUARD, cpu=cpu_name(), cores=os.cpu_count(), slurm=slurm),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="no further fault after these (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to FILE")
    options = parser.parse_args()
    if why := missing():
        parser.error(f"no Slurm here: {why}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megalite-faults-") as folder, Cluster(Path(folder), os.environ) as cluster:
        run = Campaign(cluster, options.seed)
        campaign(run, options.faults, began + 60 * options.minutes)
        cluster.run("scancel", run.case.job)
        state = run.case.ended(120)[0]
        time.sleep(8)  # in which a requeued job would start
        if (found := cluster.job(run.case.job)["JobState"]) != "CANCELLED":
            raise SystemExit(f"faults: the cancelled job is {state}, then {found}")
        curve = stand_in.recorded(run.case.run)
        if curve != stand_in.curve(len(curve)):
            raise SystemExit("faults: the curve differs from that of an undisturbed run")
        text = page(
            run,
            f"python tests/soak/faults.py --faults {options.faults} --seed {options.seed}",
            time.monotonic() - began,
            len(curve),
        )
    if options.out:
        write_whole(options.out, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
