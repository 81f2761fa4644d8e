"""Local checkpoints beside shared ones: how long training stands still, and when what was saved survives what.

Each rank acts as if on a node of its own, with a folder in memory; copies on the next node go over the loopback device.
"""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from megalite.checkpoint.host_group import HostGroup
from megalite.checkpoint.load import Restorer
from megalite.checkpoint.outcomes import Saved, SavedLocally
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.save import Saver
from megalite.checkpoint.state import State
from megalite.checkpoint.tier import Tier
from megalite.config.errors import InputError
from megalite.config.schema import Checkpoint, Config, LocalCheckpoint

Seconds = dict[str, list[float]]


def measure_tiers(state: State, config: Config, folder: Path, local: Path, rounds: int) -> dict[str, Seconds]:
    """By way: seconds of every save. The first of each, which allocates memory, is left out.

    stall: for which training stands still. complete: until the next save can begin, and any one node may be lost.
    durable: until it is in the shared folder. back: of a start after a crash, from what is on the nodes.
    """
    found: dict[str, Seconds] = {
        "shared": {"stall": [], "durable": []},
        "local": {"stall": [], "complete": [], "durable": [], "back": []},
    }
    with TemporaryDirectory(prefix="megalite-bench-", dir=local) as own:
        checkpoint = Checkpoint(keep=1, local=LocalCheckpoint(f"{own}/{dist.get_rank()}"))
        with_local = replace(config, checkpoint=checkpoint)
        for way, seconds in found.items():
            group = HostGroup()
            here = with_local if way == "local" else replace(config, checkpoint=replace(checkpoint, local=None))
            tier = Tier(here, folder / way, group, node=f"node-{dist.get_rank()}") if way == "local" else None
            with Saver(state, here, (), folder / way, group, tier=tier) as saver:
                for step in range(1, rounds + 2):
                    _save(saver, step, seconds)
                if tier is not None:
                    _go_back(saver, Restorer(state, here, (), group, tier=tier), folder / way, seconds["back"], rounds)
            for times in seconds.values():
                del times[0]
    return found


def _save(saver: Saver, step: int, seconds: Seconds, shared: bool = True) -> None:
    dist.barrier()
    began = time.perf_counter()
    saver.save(Progress(step=step), shared)
    stall = time.perf_counter() - began
    saver.wait()
    for item in saver.news():
        match item:
            case Saved():
                seconds["durable"].append(stall + item.seconds)
            case SavedLocally() if shared:
                seconds["complete"].append(stall + item.seconds)
            case SavedLocally():
                pass
            case _:
                raise InputError(f"--local: {item.error}")
    if shared:
        seconds["stall"].append(stall)


def _go_back(saver: Saver, restorer: Restorer, folder: Path, back: list[float], rounds: int) -> None:
    """Save to the nodes alone, and go on from there, again and again."""
    for step in range(rounds + 2, 2 * rounds + 3):
        _save(saver, step, {}, shared=False)
        dist.barrier()
        began = time.perf_counter()
        progress = restorer.newest(folder, lambda _: None)
        dist.barrier()
        back.append(time.perf_counter() - began)
        assert progress is not None
        assert progress.step == step
