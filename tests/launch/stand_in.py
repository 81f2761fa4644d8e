"""A stand-in for training that needs no torch: ranks that step, save, resume, stop, fail and miss each other.

Rank 0 makes the steps, and the state of every step follows from the one before. So the curve of a run shows whether it
went on from what was saved. Ranks know each other by files in the folder of the attempt, and by their process ids: all
nodes are of one machine. As megalite's ranks do, they say in that folder how they end.
"""

import argparse
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from megalite_launch.base.outcome import Failure, write_failure, write_met, write_outcome
from megalite_launch.base.run_folder import ATTEMPT, Attempt, RunFolder, node_name

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LOST = 3.0  # seconds without a sign of life of a peer
asked: list[int] = []


def state_after(state: int) -> int:
    return (state * 6364136223846793005 + 1442695040888963407) % 2**64


def curve(steps: int) -> list[int]:
    """What an undisturbed run records."""
    states = [1]
    for _ in range(steps):
        states.append(state_after(states[-1]))
    return states[1:]


def recorded(run: Path) -> list[int]:
    """The curve of a run: of every step its latest record."""
    found: dict[int, int] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("event") == "resumed":
            found = {step: state for step, state in found.items() if step <= record["step"]}
        else:
            found[record["step"]] = record["state"]
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def alive(process: int) -> bool:
    """Whether a process of this machine runs, and does not only wait to be noticed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Rank:
    """One rank of the run folder `options.run`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.run = options, RunFolder(options.run)
        self.rank = int(os.environ.get("SLURM_PROCID", "0"))
        self.ranks = int(os.environ.get("SLURM_NTASKS", "1"))
        self.attempt = Path(os.environ[ATTEMPT])
        self.step, self.began = 0, time.monotonic()

    def go(self) -> int:
        sign = self.attempt / f"alive-{self.rank}"
        sign.with_name(f".{sign.name}").write_text(str(os.getpid()))
        sign.with_name(f".{sign.name}").rename(sign)
        print(f"rank {self.rank} of {self.ranks} on {node_name()}", flush=True)
        while not (self.attempt / "outcome.json").exists():
            sign.touch()
            if asked and not self.options.deaf:
                (self.attempt / "stop").touch()
            self.miss_others()
            self.fail_as_asked()
            if self.rank == 0:
                self.lead()
            elif self.options.fail and self.rank == self.options.rank:
                self.fail_at(self.run_step())
            time.sleep(self.options.pause)
        return int(json.loads((self.attempt / "outcome.json").read_text())["code"])

    def lead(self) -> None:
        """Rank 0 does what all ranks do together, once all are there."""
        if len(list(self.attempt.glob("alive-*"))) < self.ranks:
            return
        if self.step == 0:
            write_met(self.attempt)
            self.step, self.state = self.resume()
        here = Attempt.parse(self.attempt.name)
        others = (Attempt.parse(path.name) for path in self.run.attempts.iterdir())
        if here and any(other and other.job == here.job and other > here for other in others):
            self.end(5, "another attempt has taken over")  # while this one was frozen
        if list(self.attempt.glob("fail-*")):
            return  # as a collective, which a dead rank does not join
        if self.step and self.rank != self.options.rank and self.fails_in(self.step):
            return  # the rank that fails in this step has not seen it yet
        if (self.attempt / "stop").exists():
            self.save()
            write_outcome(self.attempt, 3, self.step)
        elif self.step >= self.options.steps:
            self.save()
            write_outcome(self.attempt, 0, self.step)
        else:
            self.step, self.state = self.step + 1, state_after(self.state)
            self.tell({"step": self.step, "state": self.state})
            if self.rank == self.options.rank:
                self.fail_at(self.step)
            if self.step % self.options.every == 0:
                self.save()

    def resume(self) -> tuple[int, int]:
        step = self.run.newest_step()
        self.tell({"event": "resumed", "step": step})
        if step == 0:
            return 0, 1
        return step, int((self.run.checkpoints / f"step-{step:08d}" / "state").read_text())

    def save(self) -> None:
        if self.step == 0:
            return
        whole = self.run.checkpoints / f"step-{self.step:08d}"
        part = self.run.checkpoints / f".{whole.name}.{os.getpid()}"
        if whole.exists():
            return
        part.mkdir(parents=True)
        (part / "state").write_text(str(self.state))
        (self.attempt / "saving").touch()
        time.sleep(self.options.saving)
        if self.options.full and self.step >= self.options.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        part.rename(whole)

    def run_step(self) -> int:
        lines = self.run.metrics.read_text().splitlines() if self.run.metrics.exists() else ["{}"]
        return int(json.loads(lines[-1]).get("step", 0))

    def miss_others(self) -> None:
        """As a watchdog does."""
        now = time.time()
        for path in self.attempt.glob("alive-*"):
            if now - path.stat().st_mtime > LOST or not alive(int(path.read_text())):
                self.end(5, f"rank {path.name[6:]} gave no sign of life")

    def fails_in(self, step: int) -> bool:
        """Whether it is time to fail, and that has not been done in an attempt before."""
        done = self.options.once and (self.run.path / "failed").exists()
        return bool(self.options.fail) and step >= self.options.at and not done

    def fail_at(self, step: int) -> None:
        if self.fails_in(step):
            (self.run.path / "failed").touch()
            self.end(self.options.fail, f"failed at step {step}, as it was told")

    def fail_as_asked(self) -> None:
        """Fail if the run folder has a file `fail-RANK`, with the exit code in it and perhaps the word spin."""
        asked = self.run.path / f"fail-{self.rank}"
        if asked.exists():
            code, *spin = asked.read_text().split()
            asked.unlink()
            self.options.spin = self.options.spin or bool(spin)
            self.end(int(code), "failed, as it was asked to")

    def tell(self, record: dict[str, object]) -> None:
        with self.run.metrics.open("a") as file:
            file.write(json.dumps({"time": time.time(), **record}) + "\n")

    def end(self, code: int, text: str) -> None:
        write_failure(self.attempt, Failure(time.time(), self.rank, node_name(), code, self.step, text))
        print(text, flush=True)
        while self.options.spin:  # as a rank does that waits in NCCL for others
            time.sleep(1)
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--saving", type=float, default=0.0, help="seconds that a save takes")
    parser.add_argument("--full", type=int, default=0, help="the step from which the disk is full")
    parser.add_argument("--fail", type=int, default=0, help="with this exit code")
    parser.add_argument("--at", type=int, default=0, help="the step at which to fail")
    parser.add_argument("--rank", type=int, default=0, help="that fails")
    parser.add_argument("--once", action="store_true", help="fail in one attempt only")
    parser.add_argument("--spin", action="store_true", help="do not end after a failure")
    parser.add_argument("--deaf", action="store_true", help="do not stop when asked")
    for number in STOP:
        signal.signal(number, lambda number, _: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    rank = Rank(parser.parse_args())
    try:
        return rank.go()
    except OSError as error:
        rank.end(4 if error.errno == errno.ENOSPC else 1, f"cannot save: {error}")
    finally:
        for number in STOP:  # Python gives them back on its way out, when another would kill a rank that is done
            signal.signal(number, signal.SIG_IGN)
    return 1


if __name__ == "__main__":
    sys.exit(main())
