"""One training run that is killed again and again, and what must hold after every kill and at the end."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

import whole_checkpoints as checkpoints
from killed_job import PATIENCE, START_LOOK, Job, kill
from local_nodes import LocalNodes
from sample_count import check_epochs, trained_on
from violation import Violation

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.train.folder.records import read_records

CONFIG_FILE = "soak.yaml"
BATCH = 12  # samples in a step: one, two, three or four data-parallel ranks can share them
KEEP = 2
WHEN = (  # moments of a kill, as often as they come up
    *["start"],  # processes start, libraries are imported
    *["load"],  # a rank has a file of the checkpoint open
    *["train"],
    *["save"] * 5,  # the temporary folder has appeared
    *["rename"] * 2,  # the manifest has appeared in it
    *["publish"] * 2,  # the checkpoint has appeared under its name
    *["delete"] * 2,  # an old checkpoint begins to disappear
)
BEGUN = 2  # batches that a rank may begin after another's death: it does not know of it yet
WHO = ("job", "rank", "launcher")
LOST = 0.5  # share of the kills of a run with local checkpoints after which a node is gone, too
TOLERANCE = 1e-10  # relative, where the layout changes
COMPARED = ("loss", "grad_norm")
TROUBLE = {"bad_step", "rollback", "save_failed"}  # events that no kill may cause
NUISANCES = {  # beside kills; half of the attempts have one
    "rival": "a second job in the folder",
    "full": "a full disk",
    "unread": "stdout unread",
}
REFUSED = "another job trains in this folder"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """How fast things go here, in seconds: by it, moments are spread over what they are aimed at."""

    start: float
    step: float
    save: float

    def spread(self, when: str) -> float:
        """How long after its moment a kill may come."""
        return {"start": self.start, "load": self.save, "train": 2 * self.step, "save": self.save}.get(when, 0.001)


@dataclass
class Tally:
    """What has been seen of one run."""

    kind: str
    interval: int
    layouts: list[str] = field(default_factory=list)
    kills: list[dict] = field(default_factory=list)
    nuisances: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NUISANCES, 0))
    verified: int = 0  # checkpoints whose every file was hashed
    lost: int = 0  # nodes
    resumes: int = 0  # that were held against what was on the disk
    steps: int = 0
    epochs: list[float] = field(default_factory=list)
    difference: float = 0.0  # the largest, relative
    seconds: float = 0.0


class KilledRun:
    """A run, and its twin that nobody kills, in the folder `work`.

    steps: of the whole run, which asks for half of them first. layouts: taken in turn, one by each start; the twin has
    the first of them. kind: of `soak.KINDS`.
    """

    def __init__(
        self,
        work: Path,
        seed: int,
        layouts: Sequence[Sequence[str]],
        steps: int,
        sizes: Sequence[int],
        say: Say,
        kind: str,
    ) -> None:
        self.work, self.layouts, self.steps, self.sizes, self.say = work, layouts, steps, sizes, say
        self.rng = random.Random(seed)
        self.folder = work / "runs/killed"
        self.checkpoints = self.folder / "checkpoints"
        self.target = steps // 2
        self.attempts: list[Path] = []
        self.nodes = LocalNodes(work / "nodes", self.checkpoints)
        self.scratch = work / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.own = {"local": ["checkpoint.local.interval=1"], "files": [f"optim.placement={self.scratch}"]}.get(
            kind, []
        )
        interval = self.rng.choice((3, 5) if kind == "local" else (1, 2, 3))
        self.common = [f"run.seed={seed}", f"checkpoint.interval={interval}", f"checkpoint.keep={KEEP}"]
        self.tally = Tally(kind, interval, [" ".join(at) for at in layouts])
        self._moments: Iterator[str] = self._deal(WHEN)
        self._victims = self._deal(WHO)
        self._nuisances = self._deal([*NUISANCES, *[""] * len(NUISANCES)])

    def endure(self, kills: int) -> Tally:
        """Kill `kills` times, let the run finish, and compare it with its twin. Raises Violation."""
        began = time.monotonic()
        pace = self._train_twin()
        while len(self.tally.kills) < kills and not self._finished():
            self._attempt(pace)
        while not self._finished():
            self._attempt(None)
        self.nodes.check_empty()
        self._compare()
        self.tally.steps, self.tally.seconds = self.steps, time.monotonic() - began
        return self.tally

    def _finished(self) -> bool:
        """Whether all is done; a run that has reached its goal is given the next."""
        if checkpoints.newest(self.checkpoints) == self.target:
            if self.target == self.steps:
                return True
            self.target = self.steps
        return False

    def _train_twin(self) -> Pace:
        arguments = [CONFIG_FILE, "run.name=twin", f"train.steps={self.steps}", *self.common, *self.layouts[0]]
        with Job(arguments, self.work, self.work / "notes/twin") as job:
            began = time.time()
            job.wait_for_end()
            _check_end(job, 0)
        lines = [json.loads(line) for line in (self.work / "runs/twin/metrics.jsonl").read_text().splitlines()]
        times = [line["time"] for line in lines if "loss" in line]
        saves = [line["seconds"] for line in lines if line.get("event") == "saved"]
        return Pace(times[0] - began, (times[-1] - times[0]) / (len(times) - 1), median(saves))

    def _attempt(self, pace: Pace | None) -> None:
        """Start the job once and, with a pace, kill it at a moment of the deck."""
        number = len(self.attempts)
        layout = self.layouts[number % len(self.layouts)]
        arguments = [CONFIG_FILE, "run.name=killed", f"train.steps={self.target}", *self.common, *self.own, *layout]
        ranks, before = ranks_of(self.work, layout), checkpoints.complete(self.checkpoints)
        newest = max(self.nodes.whole(ranks), *before, 0)
        nuisance = next(self._nuisances) if pace else ""
        heard = self.rng.randint(0, 8) if nuisance == "unread" else None
        notes = self.work / f"notes/attempt-{number:03d}"
        with ExitStack() as jobs:
            job = jobs.enter_context(Job(arguments, self.work, notes, heard))
            if nuisance == "rival" and pace:
                time.sleep(self.rng.choice((0.0, self.rng.random())) * pace.start)
                rival = jobs.enter_context(Job(arguments, self.work, notes.with_name(f"{notes.name}-rival")))
                job = _winner(job, rival)
            elif nuisance == "full" and pace:
                jobs.enter_context(_full_for_a_while(job, ranks, pace, self.rng.random()))
            self.attempts.append(job.notes)
            if nuisance:
                self.tally.nuisances[nuisance] += 1
            killed = pace is not None and self._kill(job, pace, ranks, nuisance)
            if not killed:
                job.wait_for_end()
                self._check_unkilled(job, nuisance)
            self._check_resumed(job, newest, nuisance)
        self._check_kept(before)
        if killed and self.tally.kind == "local" and self.rng.random() < LOST:
            self.tally.lost += self.nodes.lose_one(ranks, self.rng)

    def _check_unkilled(self, job: Job, nuisance: str) -> None:
        """The job has come to its end, unless its last checkpoint could not be written, or its states."""
        if nuisance == "full" and job.process.returncode == 4:
            _check_end(job, 4, "cannot be written" if "cannot be written" in job.told else "could not be written")
            return
        _check_end(job, 0)
        if checkpoints.newest(self.checkpoints) != self.target:
            raise Violation(f"{job.notes}: the job ended well, but has not saved step {self.target}")

    def _kill(self, job: Job, pace: Pace, ranks: int, nuisance: str) -> bool:
        """Whether the job was killed: it may end before its moment comes."""
        when = next(when for when in self._moments if when != "load" or checkpoints.newest(self.checkpoints))
        who, nth = next(self._victims), self.rng.randint(1, 4)
        delay = self.rng.random() ** 2 * pace.spread(when)  # rather early than late
        starts = who == "launcher" and when == "start"  # all else is for ranks that are there
        if not starts and not job.wait_for(lambda: len(job.ranks()) == ranks, START_LOOK):
            return False
        victims, rank = job.victims(who, self.rng)
        if not job.wait_for(self._moment(job, when, nth)):
            return False
        time.sleep(delay)
        kill(victims)
        begun = job.batches_begun()
        gone = job.wait_until_gone()
        if (more := job.batches_begun() - begun) > ranks * BEGUN:
            raise Violation(f"{job.notes}: the ranks have begun {more} more batches after the kill")
        if job.process.returncode == 0 or (nuisance == "full" and job.process.returncode == 4):
            return False
        if rank is not None:
            _check_end(job, 5, f"rank {rank} ")
        self._note_kill(who, when, gone, nuisance)
        return True

    def _note_kill(self, who: str, when: str, gone: float, nuisance: str) -> None:
        partial = [checkpoints.note_left_behind(folder, ".partial") for folder in self._folders()]
        inside = "save" if any(partial) else ""
        inside = "delete" if checkpoints.note_left_behind(self.checkpoints, ".deleted") else inside
        if when == "save" and inside != "save":  # it was over sooner than expected
            self._moments = chain(["save"], self._moments)
        self.tally.kills.append({"who": who, "when": when, "inside": inside, "gone": gone, "nuisance": nuisance})
        at = checkpoints.newest(self.checkpoints)
        where = f", inside a {inside}" * bool(inside) + f", {nuisance}" * bool(nuisance)
        layout = self.tally.layouts[(len(self.attempts) - 1) % len(self.layouts)].replace("parallel.", "")
        self.say(f"kill {len(self.tally.kills)}: {who} at {when}{where}; newest checkpoint: step {at}; {layout}")

    def _folders(self) -> list[Path]:
        """Where checkpoints are written, here and on the nodes."""
        return [self.checkpoints, *(self.nodes.places() if self.tally.kind == "local" else [])]

    def _moment(self, job: Job, when: str, nth: int) -> Callable[[], bool]:
        """Whether the moment has come: the `nth` of this attempt, where there are several."""
        folder, seen, metrics = self.checkpoints, set[Path](), self.folder / "metrics.jsonl"
        there = {path for each in self._folders() for path in checkpoints.complete(each).values()}

        def appeared(suffix: str, holding: str = "") -> bool:
            for each in self._folders():
                seen.update(checkpoints.left_behind(each, suffix, holding))
            return len(seen) >= nth

        def published() -> int:
            return len({path for each in self._folders() for path in checkpoints.complete(each).values()} - there)

        def size() -> int:
            return metrics.stat().st_size if metrics.exists() else 0

        if when == "train":
            begin, line = size(), 200  # bytes
            return lambda: size() > begin + nth * line
        moments: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "load": lambda: job.reads_in(folder),
            "save": lambda: appeared(".partial"),
            "rename": lambda: appeared(".partial", checkpoints.MANIFEST),
            "publish": lambda: published() >= nth,
            "delete": lambda: appeared(".deleted"),
        }
        return moments[when]

    def _check_resumed(self, job: Job, newest: int, nuisance: str) -> None:
        """The job must have gone on from the newest checkpoint, if it came so far as to say so."""
        told = job.resumed_at
        if told is not None and told != (newest, newest * BATCH):
            raise Violation(f"{job.notes}: resumed at {told}, but step {newest} was the newest complete checkpoint")
        firsts = [(path.stem, line) for path in job.notes.glob("rank-*.jsonl") for line in _first_line(path)]
        began = {rank: json.loads(line)["first"] for rank, line in firsts}
        if any(first != newest * BATCH for first in began.values()):
            raise Violation(f"{job.notes}: went on from samples {began}, but the newest checkpoint is of step {newest}")
        if newest:
            self.tally.resumes += told is not None
            if (
                "rank-0" in began and told is None and nuisance != "unread"
            ):  # it speaks before it trains; the others do not wait for it
                raise Violation(f"{job.notes}: does not say that it has resumed from step {newest}")

    def _check_kept(self, before: dict[int, Path]) -> None:
        """Nothing is lost, nothing is half there, nothing was set aside, and no states are left in files."""
        after = checkpoints.complete(self.checkpoints)
        if max(after, default=0) < max(before, default=0) or len(after) < min(KEEP, len(before)):
            raise Violation(f"{self.checkpoints}: held steps {list(before)}, and now holds {list(after)}")
        if len(after) > KEEP + 1:  # the one too many is what a kill can leave
            raise Violation(f"{self.checkpoints}: holds steps {list(after)}, but checkpoint.keep = {KEEP}")
        for path in after.values():
            checkpoints.check_complete(path)
        self.tally.verified += len(after)
        if aside := [path.name for path in self.checkpoints.glob("*.damaged*")]:
            raise Violation(f"{self.checkpoints}: {aside} was set aside, but kills damage nothing")
        if left := [path.name for path in self.scratch.iterdir()]:
            raise Violation(f"{self.scratch}: holds {left}, but files of states have no name")

    def _compare(self) -> None:
        """The finished run beside its twin: what it reported, what it saved and what it read."""
        names = ("killed", "twin")
        gaps = self.tally.nuisances["full"] > 0
        mine, expected = (
            _curves(self.work / f"runs/{name}/metrics.jsonl", self.steps, gaps and name == "killed") for name in names
        )
        paths = (self.work / "runs" / name / f"checkpoints/step-{self.steps:08d}" for name in names)
        difference = checkpoints.largest_difference(*map(checkpoints.tensors_of, paths))
        for name in COMPARED:
            pairs = ((value, expected[name][step]) for step, value in mine[name].items())
            difference = max(difference, *(abs(value - other) / abs(other) for value, other in pairs))
        limit = 0.0 if len(self.layouts) == 1 else TOLERANCE
        if not difference <= limit:
            raise Violation(f"{self.folder}: differs from its twin by {difference:.3g}, more than {limit}")
        self.tally.difference = difference
        for attempts in (self.attempts, [self.work / "notes/twin"]):
            self.tally.epochs = check_epochs(trained_on(attempts, BATCH, self.steps), self.sizes)

    def _deal(self, cards: Sequence[str]) -> Iterator[str]:
        while True:
            yield from self.rng.sample(cards, len(cards))


def ranks_of(work: Path, layout: Sequence[str]) -> int:
    """How many ranks a layout has."""
    return check(load([str(work / CONFIG_FILE)], list(layout))).parallel.layout.world_size


def _check_end(job: Job, code: int, words: str = "") -> None:
    if job.process.returncode != code or words not in job.told:
        raise Violation(f"{job.notes}: exit code {job.process.returncode}, not {code} {words}\n{job.told[-2000:]}")


def _first_line(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True)[:1] if line.endswith("\n")]


def _curves(path: Path, steps: int, gaps: bool) -> dict[str, dict[int, float]]:
    """The last report of every step. Raises Violation for events that must not happen, and if a report is missing.

    gaps: the disk was full for a while, so that reports may be missing and checkpoints not have been written.
    """
    last: dict[int, dict] = {}
    events: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "event" in record:
            events[record["event"]] += 1
        elif "loss" in record:
            last[record["step"]] = record
    if trouble := {name: events[name] for name in (TROUBLE - ({"save_failed"} if gaps else set())) & events.keys()}:
        raise Violation(f"{path}: reports {trouble}")
    wanted = list(range(1, steps + 1))
    if sorted(last) != wanted and not (gaps and last.keys() <= set(wanted) and last):
        raise Violation(f"{path}: reports steps {sorted(last)}, not 1 to {steps}")
    read = [record["step"] for record in read_records(path)]
    # A report that was taken back by a resume, and could not be written again, is in `last` alone.
    if read != sorted(last) and not (gaps and read == sorted(set(read) & last.keys())):
        raise Violation(f"{path}: megalite.train.folder.records does not read steps {sorted(last)} from it, each once")
    return {name: {step: last[step][name] for step in sorted(last)} for name in COMPARED}


def _winner(*jobs: Job) -> Job:
    """Of two jobs in one folder the one that trains. Raises Violation unless the other is refused."""
    deadline = time.monotonic() + PATIENCE
    while all(job.process.poll() is None for job in jobs):
        if time.monotonic() > deadline:
            raise Violation(f"{jobs[1].notes}: neither of two jobs in one folder has ended")
        time.sleep(0.01)
    ended, other = jobs if jobs[0].process.poll() is not None else jobs[::-1]
    if ended.process.returncode == 0:  # it was done before the other came
        ended, other = other, ended
        ended.wait_for_end()
        _check_end(ended, 0 if REFUSED not in ended.told else 2)
        return other
    _check_end(ended, 2, REFUSED)
    if ended.batches_begun():
        raise Violation(f"{ended.notes}: a job that was refused has trained")
    return other


@contextmanager
def _full_for_a_while(job: Job, ranks: int, pace: Pace, share: float) -> Iterator[None]:
    """Let no write to a file succeed from a random moment of training on, for the time of some steps and a save."""
    over = threading.Event()

    def fill() -> None:
        while job.ranks_begun() < ranks:  # their notes are made by then
            if over.wait(0.05):
                return
        over.wait(share * 8 * pace.step)
        job.fill_disk(True)
        over.wait((1 - share) * 8 * pace.step + pace.save)
        job.fill_disk(False)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()
