"""`megalite train`: this process becomes one rank if a launcher has started it, and starts local ranks if none has."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megalite.base.errors import InputError, Unhealthy
from megalite.base.exit_codes import ExitCode
from megalite.base.late_import import import_for_good
from megalite.base.output import warn
from megalite.base.stop_signals import ended_at_once
from megalite.checkpoint.run.resume import check_export, check_start, starting_point
from megalite.config.load import dump, load
from megalite.config.rules.doubts import doubts
from megalite.config.rules.validate import check, check_files
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.data.check import Scans, check_data
from megalite.distributed.start.failure_report import log, note_end, note_failure, note_outcome, tell
from megalite.distributed.start.host import host_memory, on_cpus
from megalite.distributed.start.local import LAUNCHER, launch
from megalite.distributed.start.ranks import START_HINT, RankInfo, end_silently_with, find_rank_info, let_others_speak
from megalite.distributed.start.signals import die_with_launcher, end_when_stopped
from megalite.plan.memory.fit import check_memory, planned
from megalite.train.folder.lock import Lock
from megalite.train.folder.paths import Folder
from megalite.train.sources import as_remembered, open_samples

WORKER = "megalite.train.worker"


def run(args: argparse.Namespace) -> int:
    """Train, or with `args.check` only tell what would start. Returns the exit code.

    With `args.resolved`, print the configuration: the same for all starts that would read the same.
    """
    if args.resolved:
        print(dump(load(args.files, args.overrides)), end="")
        return ExitCode.DONE
    rank_info = find_rank_info()
    if args.check:
        with ended_at_once(ExitCode.STOPPED):
            return _launch(args, _ranks(args.world_size, rank_info))
    if rank_info is None:
        launcher = RankInfo(0, 1, 0)
        with ended_at_once(ExitCode.STOPPED, lambda code: note_end(code, launcher)), _noting_failures(launcher):
            return _launch(args, args.world_size)
    die_with_launcher()
    end_when_stopped(rank_info, " before the first step", ExitCode.STOPPED)
    try:
        with _noting_failures(rank_info):
            return _be_rank(args, rank_info)
    except InputError:
        if rank_info.rank != 0:
            let_others_speak(2)
        note_outcome(ExitCode.BAD_INPUT)
        raise
    except Unhealthy:
        note_outcome(ExitCode.UNHEALTHY)
        raise


@contextmanager
def _noting_failures(rank_info: RankInfo) -> Iterator[None]:
    """Note for the supervisor what this process fails of, without a group of ranks."""
    try:
        yield
    except InputError as error:
        if rank_info.rank != 0:
            end_silently_with(ExitCode.BAD_INPUT)  # as soon as rank 0 has told, which may be before this one has noted
        note_failure(ExitCode.BAD_INPUT, f"error: {error}", rank_info)
        raise
    except Unhealthy as error:
        note_failure(ExitCode.UNHEALTHY, f"error: {error}", rank_info)
        raise
    except Exception as error:
        note_failure(ExitCode.FAILED, "".join(traceback.format_exception(error)), rank_info)
        raise


def _ranks(asked: int | None, found: RankInfo | None) -> int | None:
    """The number of ranks, if it was given. Raises InputError if a launcher and --world-size contradict each other."""
    if found is None:
        return asked
    if asked not in (None, found.world_size):
        told = f"WORLD_SIZE, or srun, says that this is one of {found.world_size} ranks"
        raise InputError(f"--world-size {asked}: {told}; {START_HINT}")
    return found.world_size


def _launch(args: argparse.Namespace, ranks: int | None) -> int:
    """Check all that ranks will need, then start them; with `args.check`, write nothing and start nothing.

    ranks: their number, if it was given.
    """
    config = _checked(args, ranks)
    folder, world_size = Folder.of(config), config.parallel.layout.world_size
    folder.check(world_size)
    scans = Scans(folder.data)
    step = _first_step(config, folder, scans)
    without_gpu = on_cpus(config.run.device)
    _tell_doubts(config)
    if ranks is None and without_gpu:  # else ranks may be on several hosts
        _compare_with_memory(config)
    if args.check:
        if (owner := Lock.holder(folder.path)) is not None:
            warn(f"{folder.path}: {owner} has locked this folder; while it is alive, no other job is let in")
        print(f"ranks   {world_size}\nlayout  {config.parallel.layout}\nfolder  {folder.path}")
        print(f"steps   {step} to {config.train.steps}")
        return ExitCode.DONE
    with _owning(folder) as lock:
        check_start(config, folder.checkpoints)
        folder.make()
        scans.keep()
        arguments, shared = ["train", *args.files, *args.overrides], WORKER if without_gpu else None
        # Who loses the lock meanwhile cannot pass it on, and rank 0 says so.
        beating = lock.beating(lambda _: None)
        return launch("megalite.commands.main", arguments, world_size, folder.logs, shared, beating)


def _be_rank(args: argparse.Namespace, rank_info: RankInfo) -> int:
    """Be one rank of the job. Rank 0 owns the run folder; the others touch it once they have met rank 0."""
    config = _checked(args, _ranks(args.world_size, rank_info))
    folder = Folder.of(config)
    folder.check(rank_info.world_size)
    if rank_info.rank != 0:
        return _worker(rank_info, config, lambda: None)
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:  # else it has told
        _tell_doubts(config)
    with _owning(folder, None if launcher is None else int(launcher)) as lock:
        check_start(config, folder.checkpoints)
        folder.make()
        with _guarding(lock, rank_info) as check_owner:
            return _worker(rank_info, config, check_owner)


def _worker(rank_info: RankInfo, config: Config, check_owner: Callable[[], None]) -> int:
    # Else PyTorch tells of a peer's end by a stack of C++, in every rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # By name and only now: bad input is answered without waiting for torch.
    code: int = import_for_good(WORKER).run(rank_info, config, check_owner)
    return code


def _checked(args: argparse.Namespace, world_size: int | None) -> Config:
    """The configuration as `planned` completes it, after checks that it can work, be exported and find its files."""
    config = check(load(args.files, args.overrides), world_size)
    check_files(config)
    check_export(config)
    return planned(config, costing_of(config))


def _first_step(config: Config, folder: Folder, scans: Scans) -> int:
    """The step from which training goes on, after a check that data and checkpoint are as every rank needs them."""
    check_data(config.data, config.model, scans)
    train = open_samples(config, config.data.train)
    if config.data.valid:
        open_samples(config, config.data.valid)
    check_start(config, folder.checkpoints)
    return starting_point(config, folder.checkpoints, as_remembered(config.data.train, train))


@contextmanager
def _owning(folder: Folder, launcher: int | None = None) -> Iterator[Lock]:
    """Keep other jobs out of the run folder meanwhile. Raises InputError if another job has it.

    launcher: the process id of a local launcher. It takes the lock before it starts ranks, and passes it on to rank 0,
    which is the rank that writes.
    """
    lock = Lock.take(folder.path, launcher)
    try:
        yield lock
    finally:
        lock.free()


@contextmanager
def _guarding(lock: Lock, rank_info: RankInfo) -> Iterator[Callable[[], None]]:
    """Renew the lock meanwhile. Yields a function that ends this process if another job has come in all the same."""
    end = partial(_end, rank_info, lock.folder.parent)

    def check() -> None:
        if text := lock.lost():
            end(text)

    with lock.beating(end):
        yield check


def _end(rank_info: RankInfo, folder: Path, text: str) -> None:
    """End this process: it was out of reach for so long that its run has gone on without it, or its folder is gone.

    The latter must not be tried again: the run would begin anew. folder: of the run.
    """
    code = ExitCode.LOST_CONTACT
    if not any((folder / name).exists() for name in ("lock", "starts")):
        code, text = ExitCode.UNHEALTHY, f"{folder}: the run folder was removed while the run was going on"
    log.error(text)
    tell(code, text, rank_info)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_doubts(config: Config) -> None:
    """Warn of settings that may not be meant."""
    for doubt in doubts(config):
        warn(str(doubt))


def _compare_with_memory(config: Config) -> None:
    """Warn if ranks may not fit into this machine's memory. Raises InputError if they cannot."""
    if config.batch.micro != "auto":
        ranks = config.parallel.layout.world_size
        if told := check_memory(config, host_memory(), "this machine's memory", ranks, costing_of(config)):
            warn(told)
