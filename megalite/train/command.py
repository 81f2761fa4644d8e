"""`megalite train`: becomes one rank where a launcher has started it, and starts local ranks where none has."""

import argparse
import importlib

from megalite.config.load import load
from megalite.config.validate import check, check_files
from megalite.dist.local import launch
from megalite.dist.ranks import find_place
from megalite.train.folder import Folder


def run(args: argparse.Namespace) -> int:
    """Train; the exit code."""
    place = find_place()
    if place is not None:
        # By name and only now: the local launcher below answers bad input without waiting for torch.
        code: int = importlib.import_module("megalite.train.worker").run(place, args.files, args.overrides)
        return code
    config = check(load(args.files, args.overrides))
    check_files(config)
    logs = Folder.of(config).logs
    return launch("megalite.train.worker", [*args.files, *args.overrides], config.parallel.layout.world_size, logs)
