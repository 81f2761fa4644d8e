"""One run under the supervisor, on two nodes of a real Slurm, and what a program can do to it and see of it.

Its ranks are stand-ins for training, or training itself.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stand_in
import supervised_job
from slurm_cluster import Cluster
from supervised_job import Case
from whole_checkpoints import check_complete, complete, largest_difference, tensors_of

from megalite.data.store_writer import StoreWriter
from megalite.train.folder.records import read_records
from megalite_launch.base.run_folder import RunFolder

PATIENCE = 180.0  # seconds in which a run must have recovered
GUARD = 6
TIMEOUT = 10  # train.timeout
ENDLESS = 100_000_000
TOLERANCE = 1e-12  # of training in float64, whose number of ranks changes; relative
COMPARED = ("loss", "grad_norm", "parameter_norm", "learning_rate")
MEGALITE = str(Path(sys.executable).with_name("megalite"))
CONFIG = f"""\
run: {{device: cpu, dir: ., name: run}}
model: {{layers: 2, width: 32, heads: 2, kv_heads: 2, ffn: 64, vocab_size: 128, sequence_length: 64}}
batch: {{micro: 1, global: 4}}
train: {{steps: {ENDLESS}, precision: fp64, timeout: {TIMEOUT}}}
schedule: {{name: constant}}
checkpoint: {{interval: 10, keep: 2}}
data: {{train: [{{path: tokens}}]}}
log: {{tensorboard: false}}
"""


@dataclass
class Record:
    """A fault that the run has recovered from."""

    fault: str
    seconds: float
    causes: list[str]


class Campaign(ABC):
    """One run and what befalls it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random, self.began = cluster, random.Random(seed), time.monotonic()
        self.records: list[Record] = []
        self.work = cluster.folder / type(self).__name__.lower()
        tools = self.work / "tools"
        tools.mkdir(parents=True)
        self.broken = tools / "broken"
        for name in ("scontrol", "squeue"):
            text = f"#!/bin/sh\n[ ! -e '{self.broken}' ] || exit 1\nexec /usr/bin/{name} \"$@\"\n"
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        how = ("--min-nodes", "1", "--guard-seconds", str(GUARD), "--preflight-seconds", "3", "--max-strikes", "1000")
        self.case = self.submit(how, f"{tools}:")
        self.folder = RunFolder(self.case.run)

    @abstractmethod
    def submit(self, supervisor: tuple[str, ...], path: str) -> Case:
        """Submit the job. path: what to put before PATH."""

    @abstractmethod
    def compare(self) -> tuple[int, str]:
        """How many steps the curve has, and a sentence about it. Raises SystemExit if it is not the undisturbed one."""

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
        """Whether a step was made that late."""
        lines = self.folder.metrics.read_text().rpartition("\n")[0].splitlines()  # the last may be half written
        last = json.loads(lines[-1])
        return "step" in last and "event" not in last and last["time"] > since

    def rank(self, but: int | None = None) -> tuple[int, int]:
        """A rank of the attempt under way, and its process id. Waits for one: an attempt may just be beginning."""
        deadline = time.monotonic() + PATIENCE
        while True:
            chosen = self.random.choice([n for n in range(self.case.all("attempt")[-1]["ranks"]) if n != but])
            try:
                return chosen, self.case.ranks(chosen)
            except LookupError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def cancel(self) -> None:
        """Raises SystemExit if the job comes back, or leaves a process."""
        self.cluster.run("scancel", self.case.job)
        state = self.case.ended(120)[0]
        time.sleep(8)  # in which a requeued job would start
        if (found := self.cluster.job(self.case.job)["JobState"]) != "CANCELLED":
            raise SystemExit(f"faults: the cancelled job is {state}, then {found}")


class StandIns(Campaign):
    """A run of stand-ins, two on each node."""

    def submit(self, supervisor: tuple[str, ...], path: str) -> Case:
        endless = ("--steps", str(ENDLESS), "--pause", "0.1")
        return supervised_job.submit(
            self.cluster, "run", *endless, supervisor=supervisor, path=path, run=self.work / "run"
        )

    def compare(self) -> tuple[int, str]:
        curve = stand_in.recorded(self.case.run)
        if curve != stand_in.curve(len(curve)):
            raise SystemExit("faults: the curve differs from that of an undisturbed run")
        return len(curve), "The curve is that of an undisturbed run"


class Training(Campaign):
    """A run of `megalite train`, one rank on each node."""

    def submit(self, supervisor: tuple[str, ...], path: str) -> Case:
        write_inputs(self.work)
        (self.work / "tmp").mkdir()
        resolve, frozen = [MEGALITE, "train", "--resolved", "config.yaml"], self.work / "frozen.yaml"
        frozen.write_text(subprocess.check_output(resolve, cwd=self.work, text=True, timeout=120))
        check = shlex.join([MEGALITE, "train", "--check", "--world-size", "{ranks}", str(frozen)])
        how = (*supervisor, "--check", check, "--ranks-per-node", "1")
        how += ("--frozen", str(frozen), "--resolve", shlex.join(resolve))
        self.cluster.environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.work / "tmp")}
        return supervised_job.submit(
            self.cluster,
            "training",
            str(frozen),
            command=(MEGALITE, "train"),
            supervisor=how,
            sbatch=(f"--chdir={self.work}",),
            path=path,
            run=self.work / "run",
        )

    def compare(self) -> tuple[int, str]:
        """Records and tensors beside those of the same run left alone. What is left behind is looked for first."""
        remains = [path.name for path in self.folder.checkpoints.iterdir() if "." in path.name and path.is_dir()]
        remains += [
            path.name for path in (self.work / "tmp").iterdir() if "torchinductor" not in path.name
        ]  # its cache
        if remains:
            raise SystemExit(f"faults: left behind: {remains}")
        step = self.folder.newest_step()
        whole = complete(self.folder.checkpoints)
        for path in whole.values():
            check_complete(path)
        train_undisturbed(self.work, step)
        found, expected = (read_records(self.work / name / "metrics.jsonl") for name in ("run", "undisturbed"))
        difference = curve_difference(found, expected)
        other = complete(self.work / "undisturbed" / "checkpoints")[step]
        tensors = largest_difference(tensors_of(whole[step]), tensors_of(other))
        if not max(difference, tensors) <= TOLERANCE:
            raise SystemExit(
                f"faults: differs from an undisturbed run by {difference:.3g}, and {tensors:.3g} of tensors"
            )
        text = (
            f"Loss, gradient norm and parameter norm of every step differ by at most {difference:.1g} from those of an "
        )
        return step, f"{text}undisturbed run, all parameters and moments of the last step by {tensors:.1g} (float64)"


def write_inputs(work: Path, config: str = CONFIG) -> None:
    """The configuration, `config.yaml`, and its data."""
    work.mkdir(exist_ok=True)
    (work / "config.yaml").write_text(config)
    with StoreWriter(work / "tokens", np.uint16) as store:
        store.add(np.random.default_rng(0).integers(0, 128, 100_000))


def train_undisturbed(work: Path, steps: int, *settings: str) -> None:
    """The same training on two ranks of this machine, as the run `undisturbed`. Raises SystemExit."""
    command = [MEGALITE, "train", "config.yaml", "run.name=undisturbed", f"train.steps={steps}", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "parallel.dp_shard=2"], cwd=work, env=environment, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"faults: the undisturbed run ended with {done.returncode}: {done.stderr}")


def curve_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """The largest relative difference of what two runs report. Raises SystemExit if a step is missing."""
    steps = [record["step"] for record in expected]
    if [record["step"] for record in found] != steps or steps != list(range(1, len(steps) + 1)):
        raise SystemExit(f"faults: {len(found)} records up to step {found[-1]['step']}, not 1 to {steps[-1]}")
    pairs = ((one[name], other[name]) for one, other in zip(found, expected, strict=True) for name in COMPARED)
    return max(abs(one - other) / abs(other) for one, other in pairs)
