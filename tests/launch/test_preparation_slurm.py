"""`megalite-prepare-data --engine slurm` on a real Slurm of two nodes, with a task that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import NODES, PATIENCE, Cluster, missing

from megalite_tools.data.merge_data import main as merge
from megalite_tools.data.train_tokenizer import train_model

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SHARDS = 4
LINES = 9000  # in a shard, which takes a second


def test_two_nodes_make_the_store_of_one_process_though_a_task_is_killed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(SHARDS):
        texts = (f"shard {number} line {line} " + "hello world " * (line % 13) for line in range(LINES))
        (tmp_path / f"texts/{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "t.model").write_bytes(train_model(["hello world\n"] * 200, vocab_size=270, kind="bpe", lines=200))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    given = ("megalite-prepare-data", "texts", "--tokenizer", "t.model", "--workers")
    one = subprocess.run([*given, "1", "--out", "one"], cwd=tmp_path, env=environment, timeout=300)
    assert one.returncode == 0
    slurm = (*given, "2", "--out", "made/p", "--shards", str(SHARDS), "--engine", "slurm", "--sbatch", "exclusive=")
    made = tmp_path / "made"
    with Cluster(tmp_path_factory.mktemp("slurm"), environment) as cluster:  # its sockets need a short path

        def submit() -> list[str]:
            """The tasks of a new array."""
            said = cluster.run(*slurm, folder=tmp_path)
            (line,) = [line for line in said.splitlines() if "submitted as job" in line]
            job = line.partition("submitted as job ")[2].partition(":")[0]
            return [f"{job}_{task}" for task in range(2)]

        def states(tasks: list[str]) -> list[str]:
            return [cluster.wait(task)["JobState"] for task in tasks]

        tasks, deadline = submit(), time.monotonic() + PATIENCE
        while not (made / ".p-00001-of-00004.partial.bin").exists():  # task 1 makes shards 1 and 3
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for process in cluster.processes(SLURM_ARRAY_TASK_ID="1"):
            os.kill(process, signal.SIGKILL)
        assert states(tasks) == ["COMPLETED", "FAILED"]
        assert {cluster.job(task)["NodeList"] for task in tasks} == set(NODES)
        assert not (made / "p.shards").exists()
        assert not (made / "p-00003-of-00004.idx").exists()
        kept = {path.name: path.stat().st_mtime_ns for path in made.glob("p-*.bin")}
        tasks = submit()
        assert states(tasks) == ["COMPLETED", "COMPLETED"]
    assert not [path for path in made.iterdir() if path.name.startswith(".")]
    assert {name: (made / name).stat().st_mtime_ns for name in kept} == kept
    assert merge([str(tmp_path / "merged"), str(made / "p")]) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes()
