"""`megalite train`: becomes one rank where a launcher has started it, and starts local ranks where none has."""

import argparse
import os

from megalite.checkpoint.choose import check_start
from megalite.config.errors import InputError
from megalite.config.load import load
from megalite.config.validate import check, check_files
from megalite.dist.local import launch
from megalite.dist.ranks import find_place, let_others_speak
from megalite.dist.signals import die_with_launcher, stop_before_first_step
from megalite.imports import import_for_good
from megalite.plan.fit import fit_micro
from megalite.plan.pipeline import table_of
from megalite.train.folder import Folder

WORKER = "megalite.train.worker"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one is there where Linux has a GPU: of NVIDIA, under WSL, of AMD


def run(args: argparse.Namespace) -> int:
    """Train; the exit code."""
    place = find_place()
    if place is not None:
        die_with_launcher()
        stop_before_first_step(place)
    try:
        config = check(load(args.files, args.overrides), place.world_size if place else None)
        if config.batch.memory is not None or config.run.device == "cpu":  # else the ranks ask their GPUs
            config = fit_micro(config)
        check_files(config)
        if config.batch.micro != "auto":
            table_of(config)  # refuses a schedule that cannot run before any rank is started
        folder = Folder.of(config)
        check_start(config, folder.checkpoints)
        folder.make()
    except InputError:
        if place is not None and place.rank != 0:
            let_others_speak(2)
        raise
    if place is not None:
        # By name and only now: bad input is answered without waiting for torch.
        code: int = import_for_good(WORKER).run(place, config)
        return code
    arguments, world_size = ["train", *args.files, *args.overrides], config.parallel.layout.world_size
    shared = WORKER if _on_cpus(config.run.device) else None
    return launch("megalite.cli", arguments, world_size, folder.logs, shared)


def _on_cpus(device: str) -> bool:
    """Whether ranks here will be on CPUs, told without torch."""
    return device == "cpu" or (device == "auto" and not any(map(os.path.exists, DRIVERS)))
