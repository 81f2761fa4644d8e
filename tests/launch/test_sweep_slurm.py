"""Experiments as job arrays of a real Slurm of two nodes: chunks, shapes, requeues, and what status makes of it."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faked import Faked
from slurm_cluster import Cluster, missing

from megalite_launch.base.slurm import Answer
from megalite_launch.submit.slurm_array import element_states, largest_array

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
LARGEST = 3  # tasks of an array
LAUNCH = {"kind": "slurm", "parallel": 2, "max_gpu_hours": 100, "flops_per_second": 1e9, "cpus_only": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path_factory.mktemp("arrays"), environment, f"MaxArraySize={LARGEST}") as cluster:
        yield cluster


def launched(cluster: Cluster, faked: Faked, *words: str) -> list[str]:
    """The job arrays of a launch."""
    said = cluster.run(*faked.command("launch", *words), folder=faked.folder)
    return [line.split()[-1] for line in said.splitlines() if line.startswith("submitted")]


def ended(cluster: Cluster, faked: Faked) -> None:
    def over() -> bool:
        return not cluster.run("squeue", "--noheader", "--me")

    cluster.until(over, "the end of all jobs")


def test_chunks_shapes_and_requeues(cluster: Cluster, tmp_path: Path) -> None:
    rungs = {"a": {"model": {"width": 16}}, "b": {"model": {"width": 32}, "gpus": 2, "batch": {"micro": 2}}}
    sections: dict[str, Any] = {"rungs": rungs, "tokens": [640, 1280], "trunk": {"decay": 0.25}}
    about = {"kind": "ladder", "seeds": [0, 1, 2, 3]}
    launch = {**LAUNCH, "gpus_per_node": 1}
    faked = Faked(tmp_path, {"seconds": 0.1}, experiment=about, **sections, launch=launch)
    jobs = launched(cluster, faked)
    assert len(jobs) == 4  # four tasks of each shape, three of them in a chunk
    script = (tmp_path / "experiments/exp/launches/001.sbatch").read_text()
    assert "#SBATCH --array=0-2%2" in script
    assert "#SBATCH --dependency=afterany:" in (tmp_path / "experiments/exp/launches/002.sbatch").read_text()
    first = f"{jobs[0]}_0"
    # A task trains the runs of a seed. Of two that run, the second may begin late.
    cluster.until(lambda: len({slug.rpartition("-")[2] for slug in faked.starts()}) >= 2, "runs of two tasks")
    cluster.run("scontrol", "requeue", first)  # as an operator does
    cluster.until(lambda: cluster.job(f"{jobs[0]}_1")["JobState"] == "RUNNING", "the second task")
    cluster.run("scancel", "--batch", "--signal=USR2", f"{jobs[0]}_1")  # as Slurm does before the time limit
    assert set(launched(cluster, faked)) == set()  # all of them are submitted or running
    for task in (first, f"{jobs[0]}_1"):  # whether they were in a run or between two
        cluster.until(lambda task=task: cluster.job(task)["Restarts"] != "0", f"task {task} to be requeued")
    ended(cluster, faked)
    said = cluster.run(*faked.command("status"), folder=tmp_path)
    assert "16 runs: 16 done" in said
    assert faked.run_again() == []
    starts = faked.starts()
    assert all(starts[slug] >= 1 for slug in faked.states())
    trunks = [slug for slug in starts if starts[slug] > 1]
    assert all(slug.startswith("a-1.28kt") for slug in trunks), starts
    assert {status["job"] for status in faked.statuses().values()} >= {first, f"{jobs[1]}_0"}


def test_a_run_that_fails_fails_its_task_and_one_that_is_cancelled_is_planned(cluster: Cluster, tmp_path: Path) -> None:
    script = {"lr0.01": ["diverged"], "lr0.02": ["hang"], "lr0.03": ["done"]}
    faked = Faked(tmp_path, script, grid={"optim.lr": [0.01, 0.02, 0.03]}, launch={**LAUNCH, "parallel": 3})
    (job,) = launched(cluster, faked)
    cluster.until(lambda: cluster.job(f"{job}_0")["JobState"] == "FAILED", "the task that diverges")
    cluster.until(lambda: faked.states().get("lr0.02") == "running", "the run that hangs")
    cluster.run("scancel", "--signal=KILL", "--full", f"{job}_1")
    ended(cluster, faked)
    said = cluster.run(*faked.command("status"), folder=tmp_path)
    assert "1 planned, 1 done, 1 diverged" in said or "1 done, 1 diverged, 1 failed" in said
    faked.script({})
    deadline = time.monotonic() + 100
    while "lr0.02" not in [slug for slug, state in faked.states().items() if state == "done"]:
        assert time.monotonic() < deadline
        launched(cluster, faked, "--only", "planned,failed")
        ended(cluster, faked)
    assert faked.states() == {"lr0.01": "diverged", "lr0.02": "done", "lr0.03": "done"}


def test_what_slurm_says_is_read_and_no_answer_is_none() -> None:
    said = "7_0 RUNNING\n7_1 COMPLETED\n71_0 FAILED\nnonsense\n"
    states = element_states(["7"], lambda words: Answer(0 if words[0] == "squeue" else 1, said, ""))
    assert states == {"7_0": "RUNNING", "7_1": "COMPLETED"}
    account = "7_2|OUT_OF_MEMORY\n7_0|COMPLETED\n7_3|CANCELLED by 5\n"
    both = element_states(["7"], lambda words: Answer(0, said if words[0] == "squeue" else account, ""))
    assert both == {**states, "7_2": "OUT_OF_MEMORY", "7_3": "CANCELLED"}
    assert element_states(["7"], lambda words: Answer(124, "", "no answer")) is None
    assert largest_array(lambda words: Answer(0, "MaxArraySize            = 5\n", "")) == 5
    assert largest_array(lambda words: Answer(1, "", "")) == 1001
