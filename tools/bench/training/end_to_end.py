"""Training as users run it: `megalite train` with its loader, reports and checkpoints, and one resume.

`measure` starts the command twice, on random tokens. The first start saves in the middle and at its end, the second one
resumes there. Figures come from the run's metrics.jsonl (docs/metrics.md) and from when the processes began and ended.

The first `WARM_UP_STEPS` of each start are left out of all timings. A later step counts as *during a save* where it
overlaps with the writing of a checkpoint. The writing begins at the time of the event `saving`, which is written when
training goes on, and lasts as long as the `seconds` of the event `saved`.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite.base.errors import InputError
from megalite.base.stop_signals import held_up, listen, restore, stop
from megalite.config.load import dump, files_and_overrides, load
from megalite.config.schema import Config, Source
from megalite.data.store import token_dtype
from megalite.data.store_writer import StoreWriter
from megalite.plan.model.size import model_parameters
from megalite.train.folder.records import WARM_UP_STEPS, read_lines
from megalite_launch.base.texts import scaled
from megalite_tools.bench.training.cases import Device

RESUMED_STEPS = WARM_UP_STEPS + 5  # steps of the second start
SEED = 0  # makes the tokens
SLACK = 1 << 30  # bytes that must be free beside the checkpoints: for logs, tokens and other programs
MAX_QUOTED_BYTES = 2000  # bytes of stderr that the error of a failed start repeats
PATIENCE = (0.5, 10.0)  # seconds to wait after the first and the second interrupt
Line = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """One process of `megalite train`, with times in seconds since 1970."""

    began: float
    ended: float
    exit_code: int


@dataclass(frozen=True)
class StepRecord:
    """One training step, from its record. Times are seconds."""

    number: int
    loss: float | None
    seconds: float  # as measured by the run, which leaves out the norm of all parameters
    wall: float  # since the record before, without a standstill for a save
    waited: float  # for the batch
    ended: float  # since 1970

    @property
    def began(self) -> float:
        return self.ended - self.wall


@dataclass(frozen=True)
class Save:
    """One checkpoint of the run. Times are seconds."""

    step: int
    bytes: int
    stall: float  # training stood still
    waited: float  # the part of the stall in which the save before was still being written
    write: float  # from the end of the stall until the checkpoint was complete
    resumed: float  # when training went on, since 1970

    @property
    def complete(self) -> float:
        return self.resumed + self.write

    def overlaps(self, step: StepRecord) -> bool:
        """Return whether the checkpoint was being written during some of the step."""
        return step.began < self.complete and self.resumed < step.ended

    def report(self) -> dict[str, float]:
        return {
            "step": self.step,
            "bytes": self.bytes,
            "stall_seconds": self.stall,
            "waited_seconds": self.waited,
            "write_seconds": self.write,
            "complete_seconds": self.stall + self.write,
            "bytes_per_second": self.bytes / self.write,
        }


def measure(
    overrides: Sequence[str], folder: Path, device: Device, steps: int, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Train for `steps` steps and resume for `RESUMED_STEPS` further ones. Returns the figures of both starts.

    overrides: configuration files and `key=value` settings, as for `megalite train`. folder: a new one, on a disk with
    room for two checkpoints. They are deleted at the end, other files of the run stay. note: is given the figures so
    far after each start. Call this in the main thread: it handles signals.

    Values are None where no step was measured. `step_ms` is `step_seconds` of the metrics. `wall_ms` is the time from
    one record to the next without standstills, and so contains the reports. `tokens_per_second` follows from its
    median.

    Raises InputError where the configuration cannot be read or the disk has too little room, and RuntimeError where a
    start fails, a checkpoint could not be saved, or the second start does not continue the first.
    """
    if steps < 2:
        raise InputError(f"steps = {steps}: must be at least 2, as one save is in the middle")
    config = _config(overrides, folder.absolute(), device)
    disk = _check_room(config, folder)
    run = Path(config.run.dir) / config.run.name
    with _stoppable(), _deleting(run / "checkpoints"):
        _write_tokens(config, steps + RESUMED_STEPS)
        file = folder / "config.yaml"
        file.write_text(dump(config))
        starts: list[Start] = []
        result: dict[str, Any] = {}
        for last, interval in ((steps, (steps + 1) // 2), (steps + RESUMED_STEPS, 0)):
            settings = [f"train.steps={last}", f"checkpoint.interval={interval}"]
            starts.append(_train([str(file), *settings], folder))
            used = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
            result = _figures(read_lines(run / "metrics.jsonl"), starts, config)
            result["disk"] = {**disk, "checkpoints_bytes": used}
            note(result)
    return result


def _config(overrides: Sequence[str], folder: Path, device: Device) -> Config:
    """The configuration of both starts, but for the number of steps and when to save."""
    config = load(*files_and_overrides(overrides))
    config.run.dir, config.run.name, config.run.device = str(folder), "run", device
    config.data.train, config.data.valid = [Source(str(folder / "tokens"))], []
    config.checkpoint.resume = "auto"
    config.checkpoint.keep = 1  # room for two is needed then, as the older one goes when the newer one is complete
    config.log.interval = 1
    return config


def _check_room(config: Config, folder: Path) -> dict[str, int]:
    """Free and needed bytes of the disk. Raises InputError unless two checkpoints fit."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = model_parameters(config.model).total
    state = 3 * (8 if config.train.dtype == "fp64" else 4) * parameters  # weights and two moments
    free, needed = shutil.disk_usage(folder).free, 2 * state + SLACK
    if free < needed:
        raise InputError(
            f"{folder}: {scaled(free, 'B')} are free, but two checkpoints of {scaled(state, 'B')} each need "
            f"{scaled(needed, 'B')} with some slack; choose a folder on another disk, or a smaller model"
        )
    return {"free_bytes": free, "needed_bytes": needed}


def _write_tokens(config: Config, steps: int) -> None:
    """Write random tokens for `steps` steps.

    Small ids are frequent, as in text. A model soon learns that, so the losses show whether a resume continues.
    """
    vocab_size = config.model.vocab_size
    count = steps * _tokens_per_step(config) + 1
    tokens = np.random.default_rng(SEED).random(count) ** 4 * vocab_size
    with StoreWriter(config.data.train[0].path, token_dtype(vocab_size)) as writer:
        writer.add(tokens.astype(np.int64))


def _tokens_per_step(config: Config) -> int:
    return config.batch.global_ * config.model.sequence_length


def _train(arguments: Sequence[str], folder: Path) -> Start:
    """Run `megalite train` to its end. Raises RuntimeError if it fails. Never leaves a process behind."""
    command = [sys.executable, "-m", "megalite.commands.main", "train", *arguments]
    errors, child, began = folder / "stderr.txt", None, time.time()
    try:
        with (folder / "stdout.txt").open("wb") as out, errors.open("wb") as err, held_up():
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        code = child.wait()
    finally:
        if child is not None:
            with held_up():
                _end(child)
    if code != 0:
        told = errors.read_bytes()[-MAX_QUOTED_BYTES:].decode(errors="replace")
        raise RuntimeError(f"megalite train ended with exit code {code}: {told}")
    return Start(began, time.time(), code)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End `megalite train` at once, if it has not ended.

    At the first interrupt it would save, which may take minutes; at the second one it kills its ranks. Where it is
    killed itself, the kernel kills them.
    """
    for seconds in PATIENCE:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            return
    child.kill()
    child.wait()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let signals that ask this process to stop raise an exception meanwhile, so that it cleans up."""
    before = listen(stop)
    try:
        yield
    finally:
        restore(before)


@contextmanager
def _deleting(checkpoints: Path) -> Iterator[None]:
    """Delete the folder at the end, in whatever way that comes."""
    try:
        yield
    finally:
        with held_up(), suppress(FileNotFoundError):
            shutil.rmtree(checkpoints)


def _figures(lines: Sequence[Line], starts: Sequence[Start], config: Config) -> dict[str, Any]:
    """All figures of the starts so far. lines: those of metrics.jsonl. Raises RuntimeError as `measure` does."""
    saves = _saves(lines)
    steps = [_steps(part) for part in _by_start(lines)]
    losses = [(step.number, step.loss) for part in steps for step in part]
    if (numbers := [number for number, _ in losses]) != list(range(1, len(numbers) + 1)):
        raise RuntimeError(f"a start did not continue the one before: the steps in metrics.jsonl are {numbers}")
    timed = [step for part in steps for step in part[WARM_UP_STEPS:]]
    during = [step for step in timed if any(save.overlaps(step) for save in saves)]
    tokens = _tokens_per_step(config)
    return {
        "parameters": model_parameters(config.model).total,
        "tokens_per_step": tokens,
        **_speed([step for step in timed if step not in during], tokens),
        "during_save": _speed(during, tokens),
        "saves": [save.report() for save in saves],
        "starts": [_start(start, part) for start, part in zip(starts, steps, strict=True)],
        "exit_codes": [start.exit_code for start in starts],
        "losses": dict(losses),
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines if "loss" in line),
    }


def _by_start(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each start."""
    found: list[list[Line]] = [[]]
    for line in lines:
        if line.get("event") == "resumed":
            found.append([])
        found[-1].append(line)
    return found


def _steps(lines: Sequence[Line]) -> list[StepRecord]:
    """The steps of one start."""
    found: list[StepRecord] = []
    stall = 0.0  # since the step before
    for line in lines:
        if line.get("event") == "saving":
            stall += line["blocked"]
        elif "loss" in line:
            seconds, ended = line["step_seconds"], line["time"]
            wall = ended - found[-1].ended - stall if found else seconds
            found.append(StepRecord(line["step"], line["loss"], seconds, wall, line["data_wait_seconds"], ended))
            stall = 0.0
    return found


def _saves(lines: Sequence[Line]) -> list[Save]:
    """The checkpoints of all starts. Raises RuntimeError if one could not be saved."""
    saving = {line["checkpoint"]: line for line in lines if line.get("event") == "saving"}
    found: list[Save] = []
    for line in lines:
        if line.get("event") == "save_failed":
            raise RuntimeError(f"the checkpoint of step {line['checkpoint']} could not be saved: {line['error']}")
        if line.get("event") == "saved":
            stall, resumed = saving[line["checkpoint"]]["blocked"], saving[line["checkpoint"]]["time"]
            waited = max(0.0, found[-1].complete - (resumed - stall)) if found else 0.0
            found.append(Save(line["checkpoint"], line["bytes"], stall, waited, line["seconds"], resumed))
    return found


def _start(start: Start, steps: Sequence[StepRecord]) -> dict[str, float]:
    first, last = steps[0], steps[-1]
    return {
        "first_step": first.number,
        "last_step": last.number,
        "seconds_to_first_step": first.began - start.began,
        "first_step_seconds": first.seconds,
        "seconds_after_last_step": start.ended - last.ended,
        "seconds": start.ended - start.began,
    }


def _speed(steps: Sequence[StepRecord], tokens: int) -> dict[str, Any]:
    """Speed of the steps. tokens: of one step."""
    wall = _milliseconds([step.wall for step in steps])
    return {
        "steps": len(steps),
        "step_ms": _milliseconds([step.seconds for step in steps]),
        "wall_ms": wall,
        "data_wait_ms": _milliseconds([step.waited for step in steps]),
        "tokens_per_second": tokens / wall["median"] * 1e3 if wall else None,
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and spread, or None without any value."""
    if not seconds:
        return None
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
    return {"median": median * 1e3, "p10": p10 * 1e3, "p90": p90 * 1e3}
