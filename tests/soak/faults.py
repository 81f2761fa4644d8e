"""The fault test: runs under the supervisor, on two nodes of a real Slurm, with faults at random.

All daemons of Slurm run on this machine. After each fault a run must record a new step and save a newer checkpoint by
itself, and its curve must in the end be that of a run left alone. Nothing may be left of it but files, and a cancelled
job must not come back.
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import stand_in
from campaign import GUARD, PATIENCE, TIMEOUT, Campaign, Record, StandIns, Training
from fault_kinds import STAND_INS, TRAINING, Fault, requeue_by_hand
from slurm_cluster import Cluster, missing
from watched_run import Follower

from megalite.base.files import write_whole
from megalite.base.stop_signals import listen, stop
from megalite_tools.report_file import cpu_name

OF_STAND_INS = f"""\
## Stand-ins for training

The ranks, two on each node, are programs of tests/launch/stand_in.py: they step, save, resume, obey signals and miss
each other as megalite's ranks do, but import no torch, so that what is timed is the supervisor and Slurm. The state of
every step follows from the one before. Ranks notice a silent peer after {stand_in.LOST:.0f} s.
"""
OF_TRAINING = f"""\
## Training itself

The ranks, one on each node, are `megalite train` of a small model in float64, with `train.timeout: {TIMEOUT}`. Beside
it, `megalite-status --follow` reads the run and writes its page; its accounts must add up at the end.
"""
NOTES = """\
Seconds are from the fault to the next recorded step of an attempt that began after it. What does not end is reaped 3 s
after the first failure, and the guard waits {guard} s. A requeued job waits 6 s for Slurm (`cred_expire=5`; 121 s by
default), a preempted one for the other job too. For a frozen node it is the way to the same run on the node that is
left, after which the job is requeued to have both again; for a batch host, `SlurmdTimeout` (10 s) and its return are in
it.

{cpu}, {cores} cores, load {load[0]:.1f} before and {load[1]:.1f} at the end; Slurm {slurm}.
"""


def befall(run: Campaign, kinds: Mapping[Fault, int], count: int, deadline: float) -> None:
    """Have every kind befall the run, in a random order, and as many more as there is time for."""
    faults = list(kinds) + run.random.choices(list(kinds), list(kinds.values()), k=max(0, count - len(kinds)))
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
        print(f"{number + 1:3} {fault.__name__:34} {seconds:6.1f} s  {' '.join(causes)}", file=sys.stderr, flush=True)


def table(records: list[Record], kinds: Mapping[Fault, int]) -> list[str]:
    rows = ["| fault | times | median s | longest s | attempts ended as |", "|---|---|---|---|---|"]
    for fault in kinds:
        found = [record for record in records if record.fault == fault.__name__]
        if found:
            times = [record.seconds for record in found]
            causes = sorted({cause for record in found for cause in record.causes})
            told = f"{statistics.median(times):.1f} | {max(times):.1f} | {', '.join(causes) or '–'}"
            rows.append(f"| {fault.__name__.replace('_', ' ')} | {len(found)} | {told} |")
    return rows


def endure(run: Campaign, kinds: Mapping[Fault, int], count: int, deadline: float) -> str:
    """Have faults befall a run, end it, and compare it with one left alone. Returns the result for the page."""
    befall(run, kinds, count, deadline)
    run.cancel()
    seconds = time.monotonic() - run.began
    steps, told = run.compare()
    counts = ", ".join(
        f"{len(run.case.all(kind))} {kind}" for kind in ("attempt", "requeue", "reaped", "guard", "left_out")
    )
    return "\n".join(
        [
            f"{len(run.records)} faults over one run of {steps} recorded steps, in {seconds:.0f} s; events: {counts}.",
            textwrap.fill(f"{told}, the job stayed cancelled, and no process was left.", 120),
            "",
            *table(run.records, kinds),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser("faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="of stand-ins; 0: none (default: 60)")
    parser.add_argument("--training", type=int, default=24, metavar="N", help="of training; 0: none (default: 24)")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="no further fault after these (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to FILE")
    options = parser.parse_args()
    listen(stop)  # an exception, so that no daemon outlives this
    if why := missing():
        parser.error(f"no Slurm here: {why}")
    deadline, load = time.monotonic() + 60 * options.minutes, os.getloadavg()[0]
    parts = ["# The fault test", "", *(__doc__ or "").split("\n\n", 1)[1].strip().split("\n"), ""]
    parts += [f"    {shlex.join(['python', 'tests/soak/faults.py', *sys.argv[1:]])}", ""]
    with tempfile.TemporaryDirectory(prefix="megalite-faults-") as folder, Cluster(Path(folder), os.environ) as cluster:
        if options.faults:
            parts += [OF_STAND_INS, endure(StandIns(cluster, options.seed), STAND_INS, options.faults, deadline)]
        if options.training:
            run = Training(cluster, options.seed)
            with Follower(run.case.run) as follower:
                parts += [OF_TRAINING, endure(run, TRAINING, options.training, deadline)]
                follower.check()
        slurm = cluster.run("sinfo", "--version").split()[-1]
    loads = (load, os.getloadavg()[0])
    parts += [NOTES.format(guard=GUARD, cpu=cpu_name(), cores=os.cpu_count(), load=loads, slurm=slurm)]
    text = "\n".join(parts)
    if options.out:
        write_whole(options.out, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
