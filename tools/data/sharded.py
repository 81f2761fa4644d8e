"""A preparation in shards: the plan of its tasks, the engine that does them, and the list of their stores."""

import argparse
import hashlib
import os
import posixpath
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megalite.base.errors import InputError, counted, printable
from megalite.base.files import exists
from megalite.data.shards import MAX_SHARDS, Shard, read_shards, relative_path, shards_file, write_shards
from megalite_tools.data.documents import Skipped
from megalite_tools.data.engines import ENGINES, run_local, run_ray, submit_slurm
from megalite_tools.data.inputs import Input
from megalite_tools.data.preparation import Preparation
from megalite_tools.data.shard_task import Record, ShardTask, resumable
from megalite_tools.terminal import bar

SHARD_BYTES = 1 << 30  # bytes of input in a shard, unless --shards says how many there are


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a preparation in shards."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="make shards and the list PREFIX.shards, with processes of this machine, a Ray cluster (RAY_ADDRESS) or a"
        " job array of Slurm. The same command goes on after any loss",
    )
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="number of shards, each of whole files (default with --engine: one for each GiB of input). Without"
        " --engine it is local",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of sbatch for --engine slurm, as partition=cpu; repeatable",
    )
    # Given to tasks of an array: the hash of the plan that it was submitted with.
    parser.add_argument("--plan", help=argparse.SUPPRESS)


def prepare_shards(
    options: argparse.Namespace, settings: Preparation, inputs: Sequence[Input], skipped: Skipped
) -> None:
    """Make the shards that are not there, and then their list. Raises InputError; finished shards are kept."""
    if options.valid_fraction:
        fix = f"leave it out, then: megalite-split-data OUT {options.out} --valid-fraction {options.valid_fraction}"
        raise InputError(f"--valid-fraction: is drawn by the number of a document, which no shard knows; {fix}")
    if options.pack is not None:
        fix = f"leave it out, then: megalite-merge-data OUT {options.out} --pack {options.pack}"
        raise InputError(f"--pack: sequences would be cut anew where shards join; {fix}")
    if options.sbatch and options.engine != "slurm":
        raise InputError("--sbatch is for --engine slurm")
    tasks = plan(settings, inputs, options.out, options.shards)
    _check_list(options.out, tasks)
    if options.plan is not None:
        _array_task(options, tasks, skipped)
    elif options.engine == "slurm":
        records = [task.whole() for task in tasks]
        if None in records:
            _submit(options, tasks, records.count(None))
        else:
            _finish(options.out, tasks, [record for record in records if record is not None], skipped)
    else:
        records_by_number = {}
        try:
            with bar("encoding", sum(task.bytes for task in tasks)) as advanced:
                done = run_ray(tasks) if options.engine == "ray" else run_local(tasks, options.workers)
                for task, record in done:
                    records_by_number[task.number] = record
                    advanced(task.bytes)
        except BaseException:  # workers were killed at their shards
            for task in tasks:
                task.sweep()
            raise
        _finish(options.out, tasks, [records_by_number[task.number] for task in tasks], skipped)


def plan(settings: Preparation, inputs: Sequence[Input], out: str, shards: int | None) -> list[ShardTask]:
    """Cut the inputs, in order, into shards of about as many bytes. Depends on their sizes alone. Raises InputError."""
    total = sum(each.bytes for each in inputs)
    wanted = max(1, -(-total // SHARD_BYTES)) if shards is None else shards
    inputs = [part for each in inputs for part in each.cut(min(wanted, MAX_SHARDS))]
    possible = min(len(inputs), MAX_SHARDS)
    if shards is None:
        shards = min(wanted, possible)
    if not 1 <= shards <= possible:
        rule = f"a shard has whole files, and 1 to {possible:,} are possible here"
        raise InputError(f"--shards {shards}: {rule}; use fewer, or cut large files into several")
    reached = list(accumulate(each.bytes for each in inputs))
    ends: list[int] = []
    for number in range(1, shards):
        least, most = (ends[-1] if ends else 0) + 1, len(inputs) - (shards - number)
        ideal = total * number / shards
        ends.append(min(range(least, most + 1), key=lambda end: abs(reached[end - 1] - ideal)))
    bounds = [0, *ends, len(inputs)]
    return [
        ShardTask(settings, tuple(inputs[first:last]), out, number, shards, os.getcwd())
        for number, (first, last) in enumerate(pairwise(bounds))
    ]


def _check_list(out: str, tasks: Sequence[ShardTask]) -> None:
    """Raises InputError if there is a store of this name, or the list of another preparation."""
    for suffix in (".bin", ".idx"):
        if os.path.lexists(f"{out}{suffix}"):
            raise InputError(f"{out}{suffix}: exists already; remove it or choose another name")
    path = shards_file(out)
    if exists(path, follow=False):
        planned = {posixpath.normpath(relative_path(task.prefix, out)) for task in tasks}
        if not planned.issuperset(posixpath.normpath(shard.path) for shard in read_shards(path)):
            raise InputError(f"{path}: is the list of other shards than these; remove it or choose another --out")


def _finish(out: str, tasks: Sequence[ShardTask], records: Sequence[Record], skipped: Skipped) -> None:
    """Write the list of shards, unless it is there, and print what it has. Raises InputError without a document."""
    for record in records:
        skipped.counts.update(record.skipped.counts)
        for reason, first in record.skipped.first.items():
            skipped.first.setdefault(reason, first)
    pairs = zip(tasks, records, strict=True)
    shards = [Shard(relative_path(task.prefix, out), each.documents, each.tokens) for task, each in pairs]
    if not any(shard.documents for shard in shards):
        raise InputError(skipped.nothing_kept([each for task in tasks for each in task.inputs]))
    path = shards_file(out)
    if not exists(path, follow=False):
        try:
            with resumable():
                write_shards(out, shards)
        except InputError:
            if not exists(path, follow=False):  # otherwise another task of an array has ended at the same time
                raise
    if list(read_shards(path)) != shards:
        raise InputError(f"{path}: is the list of other shards than these; remove it or choose another --out")
    documents, tokens = sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)
    print(
        printable(
            f"{path}: {counted(len(shards), 'shard')}, {counted(documents, 'document')}, {counted(tokens, 'token')}"
        )
    )


def _plan_hash(tasks: Sequence[ShardTask]) -> str:
    return hashlib.sha256("".join(task.settings for task in tasks).encode()).hexdigest()


def _submit(options: argparse.Namespace, tasks: Sequence[ShardTask], missing: int) -> None:
    sbatch = {}
    for given in options.sbatch:
        name, _, sbatch[name] = given.partition("=")
    count = min(options.workers, len(tasks))
    arguments = ["--workers", str(count), "--plan", _plan_hash(tasks)]
    script, job = submit_slurm(options.out, count, sbatch, [*options.arguments, *arguments])
    print(printable(f"{script}: submitted as job {job}: {counted(count, 'task')} for {counted(missing, 'shard')}"))
    print(printable(f"{shards_file(options.out)} appears at the end; if it does not, the same command goes on"))


def _array_task(options: argparse.Namespace, tasks: Sequence[ShardTask], skipped: Skipped) -> None:
    """Do the part of one task of an array. The last to end writes the list. Raises InputError as `make_shard` does."""
    if options.plan != _plan_hash(tasks):
        raise InputError("the input or a setting has changed since the job was submitted; give the command again")
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not index.isdecimal():
        raise InputError("--plan is for tasks of a job array, which Slurm starts")
    for _ in run_local(tasks[int(index) :: options.workers], 1):
        pass
    records = [record for task in tasks if (record := task.whole()) is not None]
    if len(records) == len(tasks):
        _finish(options.out, tasks, records, skipped)
