"""How long a job of higher priority waits for one under the supervisor to save and make room, on a real Slurm.

Between the moment at which sbatch has taken the preemptor and its first line. The preempted job gets SIGTERM, saves,
and ends; it is requeued and comes back.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from campaign import PATIENCE, Campaign, StandIns, Training
from slurm_cluster import Cluster, missing

from megalite.base.stop_signals import listen, stop


def preempted(run: Campaign, times: int) -> list[float]:
    """Seconds that each of so many preemptors waited."""
    found = []
    run.case.trains()
    for number in range(times):
        log = run.work / f"high-{number}.log"
        high = ("-phigh", "-N2", "--exclusive", "--wrap=date +%s.%N", f"--output={log}", "--parsable")
        since = time.time()
        run.cluster.run("sbatch", *high)
        took = time.time()
        run.case.until(lambda log=log: log.exists() and log.read_text().endswith("\n"), "the preemptor", PATIENCE)
        found.append(float(log.read_text()) - took)
        print(f"{type(run).__name__}: {found[-1]:.2f} s", file=sys.stderr, flush=True)
        run.recover(since)
    run.cancel()
    return found


def main() -> int:
    parser = argparse.ArgumentParser("preemptor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=5, metavar="N", help="default: 5")
    options = parser.parse_args()
    listen(stop)  # an exception, so that no daemon outlives this
    if why := missing():
        parser.error(f"no Slurm here: {why}")
    with tempfile.TemporaryDirectory(prefix="megalite-high-") as folder, Cluster(Path(folder), os.environ) as cluster:
        for kind in (StandIns, Training):
            found = preempted(kind(cluster, 0), options.times)
            told = f"median {statistics.median(found):.1f} s, longest {max(found):.1f} s"
            print(f"{kind.__name__}: {told}; load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
