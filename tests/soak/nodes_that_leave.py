"""Training on two nodes of a real Slurm, then on one as the other is frozen, then on both again, beside one left alone.

Two ranks become one and two again; the global batch and the order of samples stay the same. Prints what was trained
where, and the largest differences from a run on two ranks throughout, in float64.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from campaign import Training
from fault_kinds import freeze_a_node, requeue_by_hand
from slurm_cluster import Cluster, missing

from megalite.base.stop_signals import listen, stop

STEPS = 30  # that each part of the run makes, or more


def main() -> int:
    listen(stop)  # an exception, so that no daemon outlives this
    if why := missing():
        print(f"nodes_that_leave: no Slurm here: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="megalite-nodes-") as folder, Cluster(Path(folder), os.environ) as cluster:
        run = Training(cluster, 0)
        for change in (None, freeze_a_node, requeue_by_hand):
            since = time.time()
            if change is not None:
                change(run)
                run.recover(since)
            before = run.folder.newest_step()
            run.case.until(lambda before=before: run.folder.newest_step() >= before + STEPS, "steps", 300)
            if change is freeze_a_node:
                run.cluster.until(lambda: "down" not in run.cluster.run("sinfo", "-h", "-o", "%T"), "both nodes", 60)
        run.cancel()
        steps, told = run.compare()
        attempts = run.case.all("attempt")
        ends = [event["step"] for event in attempts[1:]] + [steps]
        print("| nodes | ranks | steps that count | ended as |\n|---|---|---|---|")
        for attempt, end, cause in zip(attempts, ends, run.case.causes(), strict=True):
            where = f"{len(attempt['nodes'])} | {attempt['ranks']}"
            print(f"| {where} | {attempt['step'] + 1} to {end} | {cause} |")
        print(f"\n{told}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
