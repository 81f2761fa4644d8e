"""A job under the supervisor on the cluster of the tests: how it is submitted, and what can be seen of it."""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import stand_in
from slurm_cluster import NODES, PATIENCE, Cluster

from megalite_launch.base.events import Event, read_events

HELD = "--block-signal=TERM,INT,HUP,USR1,USR2"
QUICK = ("--reap-seconds", "3")


@dataclass
class Case:
    """A job whose ranks are stand-ins, or training itself, and what it leaves behind."""

    cluster: Cluster
    run: Path
    job: str

    @property
    def log(self) -> str:
        path = self.run.with_suffix(".log")
        return path.read_text() if path.exists() else ""

    @property
    def events(self) -> list[Event]:
        return read_events(self.run / "events.jsonl")

    def all(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def causes(self) -> list[str]:
        return [event["cause"] for event in self.all("attempt_ended")]

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def until(self, done: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        try:
            self.cluster.until(done, what, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log}") from None

    def trains(self) -> None:
        """Wait for another record of training."""
        steps = self.steps()
        self.until(lambda: self.steps() > steps + 1, f"{self.run.name} train")

    def ended(self, timeout: float = PATIENCE) -> tuple[str, str, str]:
        """State, exit code and restarts of the job once it has ended, and no process of it is left."""
        found = self.cluster.wait(self.job, timeout)
        self.until(lambda: not self.cluster.processes(SLURM_JOB_ID=self.job), "no process left")
        return found["JobState"], found["ExitCode"], found["Restarts"]

    def ranks(self, rank: int) -> int:
        """The process id of a rank."""
        program = (b"stand_in.py", b"/megalite\0train")
        for process in self.cluster.processes(SLURM_JOB_ID=self.job, SLURM_PROCID=str(rank)):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if any(name in command for name in program) and b"\0supervise\0" not in command and b"srun" not in command:
                return process
        raise LookupError(f"rank {rank} of {self.run.name} is not there")

    def first_process(self) -> int:
        """The batch script as soon as it is there, and holds signals up."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for process in self.cluster.processes(SLURM_JOB_ID=self.job):
                with suppress(OSError):
                    if b"env\0" not in Path(f"/proc/{process}/cmdline").read_bytes():
                        return process
        raise TimeoutError("no batch script")

    def restarted(self, times: str = "1") -> None:
        """Wait until Slurm has restarted the job, and it trains again."""

        def restarted() -> bool:
            job = self.cluster.job(self.job)
            return (job["Restarts"], job["JobState"]) == (times, "RUNNING")

        self.until(restarted, f"{self.run.name} restarted")
        self.until(lambda: any(str(event["restart"]) == times for event in self.all("attempt")), "its attempt")
        self.trains()


def submit(
    cluster: Cluster,
    name: str,
    *arguments: str,
    sbatch: tuple[str, ...] = (),
    supervisor: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    run: Path | None = None,
    path: str = "",
) -> Case:
    """Submit a job of two nodes with two ranks each, under the supervisor.

    arguments: of the command, which by default is the stand-in for training. path: put before PATH.
    """
    run = run or cluster.folder / name
    command = command or (sys.executable, stand_in.__file__, str(run))
    how = ("--run", str(run), "--ranks-per-node", "2", "--master", NODES[0], *QUICK, *supervisor)
    words = ("exec", sys.executable, "-m", "megalite_launch", "supervise", *how, "--", *command, *arguments)
    script = cluster.folder / f"{name}.sh"
    script.write_text(f"#!/usr/bin/env -S env {HELD} bash\nPATH={shlex.quote(path)}$PATH\n{shlex.join(words)}\n")
    size = ("--nodes=2", "--ntasks-per-node=2", "--no-kill", "--requeue", "--open-mode=append")
    where = (f"--output={run.with_suffix('.log')}", "--parsable")
    return Case(cluster, run, cluster.run("sbatch", *size, *where, *sbatch, str(script)))
