"""launch/slurm.sbatch on a cluster of two nodes, with Slurm's own daemons on this machine."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from slurm_cluster import NODES, Cluster, missing

from megalite_launch.base.events import read_events

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sbatch"
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def cluster(work: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), work.environment) as cluster:
        yield cluster


@pytest.fixture
def submit(work: SimpleNamespace, cluster: Cluster) -> Callable[..., str]:
    """Submits a job of two nodes, by default with two ranks each; its number."""

    def submit(*arguments: str, ranks: int = 2) -> str:
        size = ("--nodes=2", f"--ntasks-per-node={ranks}", "--cpus-per-task=1", "--gpus-per-node=0")
        where = (f"--chdir={work.folder}", f"--output={work.folder}/%j.log", "--parsable")
        return cluster.run("sbatch", *size, *where, str(SCRIPT), "config.yaml", *arguments)

    return submit


def test_trains_as_the_local_launcher_does(work, cluster, submit, expected: list[float]) -> None:
    job = submit("run.name=slurm")
    ended = cluster.wait(job)
    log = (work.folder / f"{job}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert ended["NodeList"] == "127.0.0.[1-2]"
    assert work.losses("slurm") == expected
    assert "done: 4 steps" in log


def test_a_job_with_a_killed_rank_comes_back(work, cluster, submit) -> None:
    job = submit("run.name=killed", "train.steps=1000000", "parallel.tp=1", ranks=1)
    metrics = work.folder / "runs" / "killed" / "metrics.jsonl"
    cluster.until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
    (rank,) = cluster.processes(SLURM_JOB_ID=job, SLURM_PROCID="1", SLURM_STEP_ID="0")
    os.kill(rank, signal.SIGKILL)
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "the job requeued")
    cluster.run("scancel", job)
    cluster.wait(job)
    log = (work.folder / f"{job}.log").read_text()
    assert "task 1: Killed" in log
    assert "at step 0; asking Slurm to requeue it" in log
    assert "lost a peer" not in log
    assert not cluster.processes(SLURM_JOB_ID=job)


def test_bad_configuration_is_told_once(work, cluster, submit) -> None:
    job = submit("model.heads=3")
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    log = (work.folder / f"{job}.log").read_text()
    assert log.count("model.heads = 3: must be divisible by parallel.tp = 2") == 1


def test_missing_data_is_told_once(work, cluster, submit) -> None:
    job = submit("data.train=[{path: lost}]")
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    assert (work.folder / f"{job}.log").read_text().count("no such file: lost.bin and lost.idx") == 1


def test_a_stopped_job_comes_back_and_a_cancelled_one_does_not(work, cluster, submit) -> None:
    job = submit("run.name=stopped", "train.steps=1000000", "parallel.tp=1", ranks=1)
    log, metrics = work.folder / f"{job}.log", work.folder / "runs" / "stopped" / "metrics.jsonl"
    cluster.until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step")
    cluster.run("scancel", "--signal=USR1", job)
    cluster.until(lambda: "resuming at step" in log.read_text(), "the job back at work")
    assert log.read_text().count("stopped by SIGUSR1 after step") == 1
    done = len(work.losses("stopped"))
    cluster.until(lambda: len(work.losses("stopped")) > done, "another step")
    cluster.run("scancel", job)
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), log.read_text()
    assert not cluster.processes(SLURM_JOB_ID=job)


def test_a_launched_job_is_checked_looked_after_and_watched(work, cluster) -> None:
    """megalite-launch writes the script; the supervisor has both nodes check each other before it starts the ranks."""
    size = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-only", "--cpus-per-task", "1")
    (work.folder / "launched.yaml").write_text((work.folder / "config.yaml").read_text().replace("tp: 2", "tp: 1"))
    done = work.run("megalite", "train", "launched.yaml", "run.name=local-pp")
    assert done.returncode == 0, done.stderr
    expected = work.losses("local-pp")
    told = cluster.run("megalite-launch", "slurm", "launched.yaml", *size, "run.name=launched", folder=work.folder)
    run = work.folder / "runs" / "launched"
    (submitted,) = [event for event in read_events(run / "events.jsonl") if event["event"] == "submitted"]
    job = submitted["job"]
    assert f"squeue --job {job}" in told
    ended = cluster.wait(job)
    log = (run / "logs" / f"slurm-{job}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert work.losses("launched") == expected
    kinds = {event["event"]: event for event in read_events(run / "events.jsonl")}
    assert kinds["preflight"]["ok"] == list(NODES), kinds["preflight"]
    assert kinds["preflight"]["bad"] == {}
    sheets = [json.loads(path.read_text()) for path in sorted((run / "attempts").glob("*/preflight-*.json"))]
    assert [(sheet["node"], sheet["passed"]) for sheet in sheets] == [(node, True) for node in NODES]
    assert all({"clock", "read_back"} <= sheet["measured"].keys() for sheet in sheets)  # by asking each other
    assert "finished" in work.run("megalite-status", str(run)).stdout
    assert "done" in (run / "status.html").read_text()
    # Again, as its first line advises, from another folder, and after an edit that nobody has asked for.
    edited = (work.folder / "launched.yaml").read_text().replace("steps: 4", "steps: 9")
    (work.folder / "launched.yaml").write_text(edited)
    job = cluster.run("sbatch", "--parsable", str(run / "launch" / "001.sbatch"), folder=cluster.folder)
    ended = cluster.wait(job)
    log = (run / "logs" / f"slurm-{job}.log").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert work.losses("launched") == expected
    (told,) = [event for event in read_events(run / "events.jsonl") if event["event"] == "edited"]
    assert "- steps: 4, + steps: 9; not used" in told["text"]
