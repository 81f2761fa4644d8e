"""A Slurm, ranks and a clock that are made up, around a supervisor that is real."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megalite_launch.base.events import read_events
from megalite_launch.base.outcome import Failure, write_failure, write_met, write_outcome
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.slurm import SlurmJob
from megalite_launch.supervise.policy import RestartLimits, Wants
from megalite_launch.supervise.supervisor import Check, Supervisor

RUNNING = SlurmJob("RUNNING", may_requeue=True, nodes="n[1-3]")


class Clock:
    """Time that passes only by pauses."""

    def __init__(self) -> None:
        self.time, self.pauses = 0.0, 0

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.time += seconds
        self.pauses += 1
        assert self.pauses < 100_000, "it would wait without end"


class Ranks:
    """Ranks that end when their script says so: it is called at every look, and returns the exit code."""

    def __init__(self, script: Callable[["Ranks"], int | None], folder: Path, run: RunFolder) -> None:
        self.script, self.folder, self.run = script, folder, run
        self.looks, self.asked, self.killed, self.meet = 0, list[int](), False, True

    def poll(self) -> int | None:
        self.looks += 1
        if self.meet and self.looks == 1:
            write_met(self.folder)
        return -9 if self.killed else self.script(self)

    def ask_to_stop(self, number: int) -> None:
        self.asked.append(number)

    def kill(self, pause: Callable[[float], None]) -> None:
        self.killed = True

    def said(self) -> list[str]:
        return []

    def save(self, step: int) -> None:
        (self.run.checkpoints / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)

    def fail(self, code: int, rank: int = 3, text: str = "why") -> int:
        write_failure(self.folder, Failure(1.0, rank, f"n{1 + rank // 2}", code, 1, text))
        return 143

    def finish(self, code: int = 0) -> int:
        write_outcome(self.folder, code, 9)
        return code


class Fake:
    """A backend of three nodes. attempts: the script of each attempt; the last one stays."""

    def __init__(self, run: RunFolder, *attempts: Callable[[Ranks], int | None]) -> None:
        self.run, self.attempts = run, list(attempts)
        self.where, self.job, self.restart, self.other = "slurm", "7", 0, ""
        self.meet = True  # whether all ranks meet
        self.jobs: list[SlurmJob | None] = [RUNNING]
        self.bad: list[dict[str, str]] = [{}]
        self.refusals = [""]
        self.ran: list[tuple[str, ...]] = []
        self.ranks: list[Ranks] = []
        self.full: list[bool] = []
        self.did: list[str] = []

    def rival(self, events: Sequence[dict]) -> str:
        return self.other

    def standing(self) -> SlurmJob | None:
        return self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]

    def nodes(self, job: SlurmJob | None) -> list[str]:
        return ["n1", "n2", "n3"]

    def examine(self, nodes: Sequence[str], folder: Path, full: bool, stopped: Callable[[], bool]) -> dict[str, str]:
        self.full.append(full)
        return self.bad.pop(0) if len(self.bad) > 1 else self.bad[0]

    def start(self, start: object, command: Sequence[str]) -> Ranks:
        assert command == ["train", "a b"]
        self.ran.append(start.nodes)  # type: ignore[attr-defined]
        script = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        self.ranks.append(Ranks(script, start.folder, self.run))  # type: ignore[attr-defined]
        self.ranks[-1].meet = self.meet
        return self.ranks[-1]

    def requeue(self) -> str:
        self.did.append("requeue")
        return self.refusals.pop(0) if len(self.refusals) > 1 else self.refusals[0]

    def begin(self) -> None:
        self.did.append("begin")

    def end(self) -> None:
        self.did.append("end")


class World:
    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.clock = Clock()
        self.check: Callable[[int], Check] = lambda ranks: Check(0)
        self.wants, self.limits = Wants(2, 1, 0, 2), RestartLimits()

    def supervisor(self, *attempts: Callable[[Ranks], int | None]) -> Supervisor:
        self.slurm = Fake(self.folder, *attempts)
        return Supervisor(
            self.folder,
            ["train", "a b"],
            self.slurm,
            self.wants,
            self.limits,
            lambda ranks: self.check(ranks),
            self.clock,
        )

    def told(self) -> list[str]:
        return [event["event"] for event in read_events(self.folder.events)]

    def last(self, event: str) -> dict:
        return [found for found in read_events(self.folder.events) if found["event"] == event][-1]
