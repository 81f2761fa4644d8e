"""A run folder as the supervisor and the ranks would leave it, with failures of all kinds, made up from numbers."""

import json
from math import exp
from pathlib import Path
from random import Random

from megalite_launch.base.outcome import Failure, write_failure
from megalite_launch.base.run_folder import Attempt, RunFolder

BEGAN = 1_790_000_000.0  # seconds since 1970


class MadeUp:
    """Writes the lines of a run as its time goes on."""

    def __init__(self, path: Path, seed: int = 0, pace: float = 2.0, save_every: int = 100) -> None:
        self.run, self.random, self.now = RunFolder(path), Random(seed), BEGAN
        self.pace, self.save_every = pace, save_every
        self.step = self.saved = 0
        self.heard = False
        (path / "starts").mkdir(parents=True)
        (path / "starts/001.json").write_text(json.dumps({"steps": 2000, "ranks": 16}))

    def event(self, kind: str, by: str, text: str, **details: object) -> None:
        with self.run.events.open("a") as file:
            file.write(json.dumps({"time": self.now, "event": kind, "by": by, **details, "text": text}) + "\n")

    def metric(self, step: int, **values: object) -> None:
        with self.run.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": self.now, **values}) + "\n")

    def job(self, restart: int, wait: float) -> None:
        self.now += wait
        nodes = [f"n{at:03d}" for at in range(1, 4)]
        text = f"job 4711 began on 3 nodes, restart {restart}"
        self.event("begin", "supervisor", text, job="4711", restart=restart, nodes=nodes, spares=1, step=self.saved)

    def attempt(self, name: str, steps: int) -> None:
        """Restart from the newest checkpoint and take `steps` steps."""
        self.now += 8
        self.event(
            "attempt", "supervisor", f"attempt {name} on 2 nodes from step {self.saved}",
            attempt=name, nodes=["n001", "n002"], ranks=16, step=self.saved,
        )  # fmt: skip
        self.now += 45
        self.step = self.saved
        if self.heard:
            self.metric(self.step, event="resumed")
        self.heard = True
        for _ in range(steps):
            self.now += self.pace
            self.step += 1
            loss = 2 + 6 * exp(-self.step / 300) + self.random.gauss(0, 0.04)
            seconds = self.pace * (1 + abs(self.random.gauss(0, 0.03)))
            self.metric(
                self.step, loss=loss, grad_norm=1.0, step_seconds=seconds, tokens_per_second=4e6 / seconds,
            )  # fmt: skip
            if self.step % self.save_every == 0:
                self.now += 1.5
                self.metric(self.step, event="saving", checkpoint=self.step, blocked=1.5)
                self.saved = self.step
                self.metric(self.step, event="saved", checkpoint=self.step, bytes=8.0e9, seconds=20.0)
            if self.step % 250 == 0:
                self.now += 6
                self.metric(self.step, valid_loss=loss + 0.05)

    def fails(self, name: str, cause: str, rank: int, node: str, why: str, after: float, code: int = 1) -> None:
        self.now += after
        attempt = Attempt.parse(name)
        assert attempt is not None
        folder = self.run.attempt(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        write_failure(folder, Failure(self.now - 2, rank, node, code, self.step + 1, why))
        peer = f"lost rank {rank}: connection closed by peer"
        for other in range(3):
            if other != rank:
                write_failure(folder, Failure(self.now - 1, other, "n001", 5, self.step + 1, peer))
        first = {"rank": rank, "node": node, "text": why}
        text = f"attempt {name} ended: {cause}; first rank {rank} on {node}"
        self.event(
            "attempt_ended", "supervisor", text, attempt=name, cause=cause, code=code, first=first,
            from_step=0, to_step=self.saved, seconds=1.0,
        )  # fmt: skip


def made_up(path: Path) -> MadeUp:
    """A run that has failed twice, was requeued once, and goes on."""
    run = MadeUp(path)
    run.event("submitted", "megalite-launch", "job 4711 was submitted", job="4711", script="run.sbatch")
    run.job(0, 600)
    run.event("preflight", "supervisor", "3 of 3 nodes are healthy", ok=["n001", "n002", "n003"], bad={})
    run.attempt("4711.0.0", 430)
    run.fails("4711.0.0", "crash", 9, "n002", "CUDA error: an illegal memory access was encountered", 20)
    run.attempt("4711.0.1", 310)
    run.event(
        "straggler", "ranks", "rank 9 on n002 is 1.23 times slower than its peers",
        node="n002", rank=9, section="forward", ratio=1.23, step=700,
    )  # fmt: skip
    run.fails("4711.0.1", "hang", 9, "n002", "no answer to the roll call", 120, 5)
    run.event("left_out", "supervisor", "n002 was first to fail twice, so it is left out", node="n002", reason="twice")
    run.now += 3
    run.event("requeue", "supervisor", "requeued: only 1 healthy node", reason="only 1 healthy node")
    run.job(1, 1800)
    run.attempt("4711.1.0", 500)
    return run
