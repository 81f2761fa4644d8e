"""The step time that a run folder records, and the configuration it belongs to."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from megalite.base.errors import InputError
from megalite.base.files import is_file, is_folder
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.train.folder.records import WARM_UP_STEPS, read_lines

MIN_RECORDS = 3  # records that a median is taken of
MAX_WAITING_SHARE = 0.05  # share of a step that it may wait for data; more of that is not the cluster's speed


@dataclass(frozen=True)
class MeasuredRun:
    """The latest start of a run. seconds: the median time of its steps."""

    folder: Path
    config: Config
    seconds: float


def read_run(folder: Path) -> MeasuredRun:
    """The run in `folder`, with the median step time since its latest start. Raises InputError if it has too few
    records, or waits too long for data."""
    if not is_folder(folder):
        raise InputError(f"{folder}: is no folder; give the folders of runs")
    lines, config = read_lines(folder / "metrics.jsonl"), _config(folder)
    starts = [index for index, line in enumerate(lines) if line.get("event") == "resumed"]
    begin = starts[-1] if starts else 0
    first = lines[begin]["step"] if starts else 0
    seconds, waits, before = [], [], first
    for line in lines[begin:]:
        if line.get("step_seconds") is None:
            continue
        if before >= first + WARM_UP_STEPS:
            seconds.append(line["step_seconds"])
            waits.append(line.get("data_wait_seconds") or 0.0)
        before = line["step"]
    if len(seconds) < MIN_RECORDS:
        rule = f"has {len(seconds)} records of step times after the first {WARM_UP_STEPS} steps of its latest start"
        raise InputError(
            f"{folder}: {rule}, fewer than {MIN_RECORDS}; give a longer run, or use a smaller log.interval"
        )
    time, wait = median(seconds), median(waits)
    if wait > MAX_WAITING_SHARE * time:
        rule = f"waits for data {wait / time:.0%} of its time, which no cluster file has"
        raise InputError(f"{folder}: {rule}; give a run that does not, or leave it out")
    return MeasuredRun(folder, config, time)


def _config(folder: Path) -> Config:
    """The configuration of the latest start, checked."""
    starts = sorted((folder / "starts").glob("[0-9]*.yaml"))
    path = starts[-1] if starts else folder / "config.yaml"
    if not is_file(path):
        raise InputError(f"{path}: is missing; give the folder of a run that megalite train has made")
    config = load([str(path)], [])
    for key, value in (("batch.rampup", config.batch.rampup), ("batch.curriculum", config.batch.curriculum)):
        if value is not None:
            raise InputError(f"{path}: {key}: steps of different sizes have no one time; give a run without it")
    if config.batch.micro == "auto" or config.parallel.dp_shard == "auto":
        key = "batch.micro" if config.batch.micro == "auto" else "parallel.dp_shard"
        raise InputError(f"{path}: {key} = auto: the number is not in this file; give a run that names it")
    return check(replace(config, run=replace(config.run, device="cuda")))
