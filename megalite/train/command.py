"""`megalite train`: becomes one rank where a launcher has started it, and starts local ranks where none has."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from megalite.checkpoint.choose import check_start, starting_point
from megalite.config.errors import InputError
from megalite.config.load import load
from megalite.config.rules.optim import doubts
from megalite.config.schema import Config
from megalite.config.validate import check, check_files
from megalite.data.check import check_data
from megalite.dist.host import host_memory, on_cpus
from megalite.dist.last_words import log, note_outcome, tell
from megalite.dist.local import LAUNCHER, launch
from megalite.dist.ranks import Place, find_place, let_others_speak
from megalite.dist.signals import die_with_launcher, stop_before_first_step
from megalite.imports import import_for_good
from megalite.output import warn
from megalite.plan.fit import check_memory, planned
from megalite.train.folder import Folder
from megalite.train.lock import Lock
from megalite.train.sources import as_remembered, open_samples

WORKER = "megalite.train.worker"


def run(args: argparse.Namespace) -> int:
    """Train, or with `args.check` only tell what would start; the exit code."""
    found = find_place()
    place = None if args.check else found
    if place is not None:
        die_with_launcher()
        stop_before_first_step(place)
    try:
        config = _checked(args, _ranks(args.world_size, found))
        folder, world_size = Folder.of(config), config.parallel.layout.world_size
        folder.check(world_size)
        step = _first_step(config, folder) if place is None else 0
        without_gpu = on_cpus(config.run.device)
        if LAUNCHER not in os.environ and (place is None or place.rank == 0):  # else the launcher has told
            for doubt in doubts(config):
                warn(str(doubt))
        if place is None and args.world_size is None and without_gpu:  # else ranks may be on several hosts
            _compare_with_memory(config)
        with _owning(folder, place) as lock:
            check_start(config, folder.checkpoints)
            folder.make()
            if args.check:
                print(f"ranks   {world_size}\nlayout  {config.parallel.layout}\nfolder  {folder.path}")
                print(f"steps   {step} to {config.train.steps}")
                return 0
            if place is not None:
                with _guarding(lock, place) as check_owner:
                    # By name and only now: bad input is answered without waiting for torch.
                    code: int = import_for_good(WORKER).run(place, config, check_owner)
                    return code
            assert lock is not None, "a launcher takes it"
            arguments, shared = ["train", *args.files, *args.overrides], WORKER if without_gpu else None
            # Who loses the lock meanwhile cannot pass it on, and rank 0 says so.
            return launch("megalite.cli", arguments, world_size, folder.logs, shared, lock.beating(lambda _: None))
    except InputError:
        if place is not None:
            if place.rank != 0:
                let_others_speak(2)
            note_outcome(2)
        raise


def _ranks(asked: int | None, found: Place | None) -> int | None:
    """The number of ranks, as far as it is told. Raises InputError where a launcher and --world-size contradict."""
    if found is None:
        return asked
    if asked not in (None, found.world_size):
        raise InputError(
            f"--world-size {asked}: a launcher has started this process as one of {found.world_size} ranks"
        )
    return found.world_size


def _checked(args: argparse.Namespace, world_size: int | None) -> Config:
    """The configuration, if it can work and the files that it names are there."""
    config = check(load(args.files, args.overrides), world_size)
    check_files(config)
    return planned(config)


def _first_step(config: Config, folder: Folder) -> int:
    """The step that training goes on from, if data and checkpoint are what every rank will need."""
    check_data(config.data, config.model.vocab_size, folder.data)
    train = open_samples(config, config.data.train)
    if config.data.valid:
        open_samples(config, config.data.valid)
    check_start(config, folder.checkpoints)
    return starting_point(config, folder.checkpoints, as_remembered(config.data.train, train))


@contextmanager
def _owning(folder: Folder, place: Place | None) -> Iterator[Lock | None]:
    """Let no other job into the run folder meanwhile. Yields the lock, None on ranks that need none.

    A local launcher takes the lock before it starts ranks, and passes it on to rank 0, which is the one that writes.
    Raises InputError where another job has it.
    """
    if place is not None and place.rank != 0:
        yield None
        return
    lock = Lock.take(folder.path, int(os.environ[LAUNCHER]) if place and LAUNCHER in os.environ else None)
    try:
        yield lock
    finally:
        lock.free()


@contextmanager
def _guarding(lock: Lock | None, place: Place) -> Iterator[Callable[[], None]]:
    """Give signs of life meanwhile. Yields what ends this process if another job has come in all the same."""
    if lock is None:
        yield lambda: None
        return
    end = partial(_end, place)

    def check() -> None:
        if text := lock.lost():
            end(text)

    with lock.beating(end):
        yield check


def _end(place: Place, text: str) -> None:
    """End this process, which was out of reach for so long that its run has gone on without it."""
    log.error(text)
    tell(5, text, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(5)


def _compare_with_memory(config: Config) -> None:
    """Warn where ranks on this machine may not fit. Raises InputError where they cannot."""
    if config.batch.micro != "auto":
        ranks = config.parallel.layout.world_size
        if told := check_memory(config, host_memory(), "this machine's memory", ranks):
            warn(told)
