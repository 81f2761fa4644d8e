"""Training under the supervisor of a Slurm job, in a run folder whose file system is really full."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import supervised_job
from slurm_cluster import Cluster, missing
from supervised_job import Case

from megalite.train.folder.records import read_records
from megalite_launch.base.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from whole_checkpoints import check_complete, complete

SIZE = "16m"
MANY = 100_000  # steps, which nobody waits for
CONFIG = ("config.yaml", "run.name=run", "checkpoint.interval=4", "parallel.pp=1", "parallel.tp=1")
CONFIG += ("schedule.name=constant", "train.precision=fp64")


def _no_mount(folder: Path) -> str:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True)
    return done.stderr.decode() if done.returncode else ""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 16 MiB."""
    if why := missing():
        pytest.skip(why)
    if why := _no_mount(tmp_path):
        pytest.skip(f"cannot mount: {why}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=30)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not a byte is free on the file system meanwhile."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        filler.unlink()


def newest(run: Path) -> int:
    return RunFolder(run).newest_step()


def test_a_full_disk(disk: Path, work: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Training goes on, saves as soon as there is room, and ends with 4 when too many saves have failed."""
    run, config = disk / "run", (*CONFIG, f"run.dir={disk}")
    check = shlex.join(["megalite", "train", "--check", "--world-size", "{ranks}", *config])
    folder = tmp_path_factory.mktemp("full")
    with Cluster(folder, work.environment) as cluster:

        def submit(name: str, *arguments: str) -> Case:
            how = ("--check", check, "--ranks-per-node", "1")
            where = (f"--chdir={work.folder}", f"--output={folder}/{name}.log")
            command = ("megalite", "train", *config, *arguments)
            return supervised_job.submit(cluster, name, sbatch=where, supervisor=how, command=command, run=run)

        case = submit("first", f"train.steps={MANY}", f"checkpoint.max_failures={MANY}")
        case.until(lambda: newest(run) > 0, "a checkpoint")
        with full(disk):
            step = newest(run)
            time.sleep(2)  # of steps whose saves fail
            assert newest(run) <= step + 4  # which was being written
            for path in complete(run / "checkpoints").values():
                check_complete(path)
            step = newest(run)
        case.until(lambda: newest(run) > step, "a checkpoint once there is room")
        assert case.causes() == []  # nothing was started again
        cluster.run("scancel", case.job)
        assert case.ended()[0] == "CANCELLED"
        told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert "No space left on device" in str([line for line in told if line.get("event") == "save_failed"])

        case = submit("second", f"train.steps={MANY}", "checkpoint.max_failures=1")
        step = newest(run)
        case.until(lambda: newest(run) > step, "a checkpoint")
        with full(disk):
            assert case.ended()[:2] == ("FAILED", "4:0"), (folder / "second.log").read_text()
        said = (folder / "second.log").read_text()
        assert f"{run}: No space left on device" in said.splitlines()[-1]
        assert len(case.all("attempt")) <= 2  # none but the first of each job
        for path in complete(run / "checkpoints").values():
            check_complete(path)

        with full(disk):  # before the start
            attempts = len(case.all("attempt"))
            case = submit("restart", f"train.steps={MANY}")
            assert case.ended() == ("FAILED", "4:0", "0"), (folder / "restart.log").read_text()
            assert len(case.all("attempt")) <= attempts + 1
        said = (folder / "restart.log").read_text()
        assert "ends with exit code 4: " in said.splitlines()[-1]
        assert f"{run}" in said.splitlines()[-1]
        assert "No space left on device" in said.splitlines()[-1]

        step = newest(run)
        case = submit("third", f"train.steps={step + 4}")
        assert case.ended()[:2] == ("COMPLETED", "0:0"), (folder / "third.log").read_text()
        undisturbed = ("megalite", "train", *CONFIG, f"run.dir={folder}", f"train.steps={step + 4}")
        done = work.run(*undisturbed, "parallel.dp_shard=2")
        assert done.returncode == 0, done.stderr
    expected = {record["step"]: record["loss"] for record in read_records(folder / "run/metrics.jsonl")}
    found = {record["step"]: record["loss"] for record in read_records(run / "metrics.jsonl")}
    assert len(found) > 8
    assert found == {step: expected[step] for step in found}  # some reports had no room
