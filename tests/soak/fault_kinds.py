"""What befalls a run in the fault test."""

import os
import resource
import signal
import time
from collections.abc import Callable

from campaign import PATIENCE, Campaign
from slurm_cluster import NODES

Fault = Callable[[Campaign], None]


def kill_a_rank(run: Campaign) -> None:
    os.kill(run.rank()[1], signal.SIGKILL)


def stop_a_rank(run: Campaign) -> None:
    os.kill(run.rank()[1], signal.SIGSTOP)


def kill_a_rank_beside_a_stopped_one(run: Campaign) -> None:
    """The stopped one cannot end by itself."""
    stopped, process = run.rank()
    other = run.rank(but=stopped)[1]
    os.kill(process, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)


def kill_a_rank_in_a_save(run: Campaign) -> None:
    process, deadline = run.rank()[1], time.monotonic() + PATIENCE
    while not any(run.folder.checkpoints.glob("step-*.partial*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(process, signal.SIGKILL)


def crash_in_native_code(run: Campaign) -> None:
    os.kill(run.rank()[1], signal.SIGSEGV)


def run_out_of_memory(run: Campaign) -> None:
    """From now on the system refuses a rank's wishes for more."""
    process = run.rank()[1]
    run.case.trains()
    resource.prlimit(process, resource.RLIMIT_AS, (1, 1))


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
    high = ("-phigh", "-N2", "--exclusive", "--wrap=sleep 1", f"--output={run.work}/high.log")
    run.cluster.run("sbatch", "--parsable", *high)


def stop_while_slurm_fails(run: Campaign) -> None:
    ended = len(run.case.all("attempt_ended"))
    run.broken.touch()
    signal_to_the_ranks(run)
    run.case.until(lambda: len(run.case.all("attempt_ended")) > ended, "an end")
    time.sleep(3)
    run.broken.unlink()


def take_a_file_away(run: Campaign) -> None:
    """The data, in a restart, for some seconds."""
    waited, files = len(run.case.all("waiting")), list(run.work.glob("tokens*"))
    for path in files:
        path.rename(run.work / f"away-{path.name}")
    kill_a_rank(run)
    run.case.until(lambda: len(run.case.all("waiting")) > waited + 1, "a second pause", PATIENCE)
    for path in files:
        (run.work / f"away-{path.name}").rename(path)


def edit_the_configuration(run: Campaign) -> None:
    """In a way that would show in the curve, if it was used."""
    told, path = len(run.case.all("edited")), run.work / "config.yaml"
    before = path.read_text()
    path.write_text(f"{before}optim: {{lr: {run.random.uniform(0.01, 0.1):.6f}}}\n")
    kill_a_rank(run)
    run.case.until(lambda: len(run.case.all("edited")) > told, "the edit told", PATIENCE)
    path.write_text(before)


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


BY_SLURM: dict[Fault, int] = {
    signal_to_the_ranks: 6,
    signal_to_the_script: 6,
    requeue_by_hand: 3,
    preempt: 3,
    stop_while_slurm_fails: 3,
    freeze_a_node: 3,
    lose_the_batch_host: 2,
    freeze_the_batch_host: 2,
}
STAND_INS: dict[Fault, int] = {kill_a_rank: 14, stop_a_rank: 8, fail: 10, fail_and_spin: 8, **BY_SLURM}
TRAINING: dict[Fault, int] = {
    kill_a_rank: 6,
    kill_a_rank_in_a_save: 6,
    crash_in_native_code: 3,
    run_out_of_memory: 3,
    stop_a_rank: 4,
    kill_a_rank_beside_a_stopped_one: 3,
    take_a_file_away: 3,
    edit_the_configuration: 3,
    **BY_SLURM,
}
