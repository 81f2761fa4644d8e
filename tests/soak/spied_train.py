"""`megalite train` that also notes what it trains on: `python -m spied_train train CONFIG KEY=VALUE ...`.

Every rank appends a line to a file of its own, in the folder that the environment names, for every batch that its
training loop is handed: the first sample's number in the run, which share of the batch this is, and the first tokens
of every sequence, by which `sample_count.py` tells where in the data it comes from.
"""

import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megalite.commands.main import main
from megalite.distributed.start.local import launch
from megalite.distributed.start.ranks import RankInfo, find_rank_info

NOTES = "SOAK_NOTES"  # environment: the folder for notes
NODES = "SOAK_NODES"  # environment: the folder for nodes; each rank acts as if on one of its own
SHOWN = 2  # tokens of a sequence that are noted
SPACE = 1 << 16  # bytes for the notes of a rank
Batches = Callable[[Any, Iterable[Any]], Iterator[tuple[Any, Any]]]


def spied(batches: Batches, rank_info: RankInfo) -> Batches:
    """`Loader.batches`, noting what goes out."""

    def noting(loader: Any, wanted: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        path = Path(os.environ[NOTES]) / f"rank-{rank_info.rank}.jsonl"
        path.write_bytes(bytes(SPACE))  # it is there before the disk is said to be full
        with path.open("r+b") as file, mmap.mmap(file.fileno(), SPACE) as notes:
            for batch, micros in batches(loader, wanted):
                tokens = micros.tokens.flatten(0, 1)[:, :SHOWN].tolist()
                notes.write(
                    json.dumps({"first": batch.first, "share": loader.dp_rank, "tokens": tokens}).encode() + b"\n"
                )
                yield batch, micros

    return noting


if __name__ == "__main__":
    rank_info = find_rank_info()
    if rank_info is None:  # the launcher, which needs no torch: its ranks come here too
        patch: Any = mock.patch("megalite.commands.train.launch", lambda _, *rest: launch("spied_train", *rest))
    else:
        loader = importlib.import_module("megalite.data.loader").Loader
        patch = mock.patch.object(loader, "batches", spied(loader.batches, rank_info))
        tier, node = importlib.import_module("megalite.checkpoint.local.tier"), f"node-{rank_info.rank}"
        mock.patch.multiple(tier, node_name=lambda: node, root_of=lambda _: Path(os.environ[NODES]) / node).start()
    with patch:
        sys.exit(main())
