"""Local checkpoints beside shared ones: how long training stands still, and when what was saved survives what.

Each rank acts as if on a node of its own, with a folder in memory; copies on the next node go over the loopback device.
"""

import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.base.errors import InputError
from megalite.checkpoint.local.tier import Tier
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Saved, SavedLocally, Served
from megalite.checkpoint.store.state import State
from megalite.config.schema import Checkpoint, Config, LocalCheckpoint

Seconds = dict[str, list[float]]
LOOK_COUNT = 20  # between two saves


def measure_tiers(state: State, config: Config, folder: Path, local: Path, rounds: int) -> dict[str, Seconds]:
    """By way: seconds of every save. The first of each, which allocates memory, is left out.

    stall: for which training stands still. complete: until the next save can begin, and any one node may be lost.
    durable: until it is in the shared folder. back: of a start after a crash, from what is on the nodes.
    """
    found: dict[str, Seconds] = {
        "shared": {"stall": [], "durable": []},
        "local": {"stall": [], "complete": [], "durable": [], "back": []},
    }
    for way, seconds in found.items():
        group = HostGroup()
        here = _configured(config, local if way == "local" else None)
        tier = _tier(here, folder / way, group)
        with Saver(state, here, (), folder / way, group, tier=tier) as saver:
            for step in range(1, rounds + 2):
                _save(saver, step, seconds)
            if tier is not None:
                _go_back(saver, Restorer(state, here, (), group, tier=tier), folder / way, seconds["back"], rounds)
        for times in seconds.values():
            del times[0]
    return found


@dataclass(frozen=True)
class Rhythm:
    """Rhythm of the saves that interrupt training."""

    pause: float  # seconds of work between two saves
    saves: int
    every: int  # saves of which one is copied to the shared folder, or is made at all if that is done rarely


def measure_standstill(
    state: State, config: Config, folder: Path, local: Path, rhythm: Rhythm
) -> dict[str, dict[str, Any]]:
    """By way: the cost of saves while work goes on. A save waits until the one before is written.

    stood_still: the seconds of every save. seconds: of all. lost: of work, on average, in a crash at any moment, until
    what was complete before it. durable: how many saves have reached the shared folder.
    """
    found: dict[str, dict[str, Any]] = {}
    ways = {
        "shared": replace(rhythm, every=1),
        "shared, rarely": replace(rhythm, pause=rhythm.pause * rhythm.every, saves=-(-rhythm.saves // rhythm.every)),
        "local": rhythm,
    }
    for way, own in ways.items():
        group, path = HostGroup(), folder / f"standstill-{len(found)}"
        here = _configured(config, local if way == "local" else None)
        with Saver(state, here, (), path, group, tier=_tier(here, path, group)) as saver:
            saver.save(Progress(step=1))  # it allocates memory
            saver.wait()
            saver.news()
            found[way] = _train(saver, own, way == "local")
        group.everywhere(partial(_remove, path))
    return found


def _train(saver: Saver, rhythm: Rhythm, locally: bool) -> dict[str, Any]:
    """Save again and again while work goes on, which here is the passing of time."""
    dist.barrier()
    began, stood_still, durable = time.perf_counter(), [], 0
    worked, complete, lost = 0.0, 0.0, 0.0  # seconds of work: done, safe from a crash, and lost if one came, summed up
    at: dict[int, float] = {}  # by step: the work that was done by then
    for step in range(2, rhythm.saves + 2):
        for _ in range(LOOK_COUNT):
            time.sleep(rhythm.pause / LOOK_COUNT)
            worked += rhythm.pause / LOOK_COUNT
            for item in saver.news():
                durable += isinstance(item, Saved)
                if not isinstance(item, Saved | SavedLocally | Served):
                    raise InputError(f"--folder: {item.error}")
                if isinstance(item, SavedLocally) == locally:
                    complete = max(complete, at[item.step])
            lost += (worked - complete) / LOOK_COUNT
        at[step] = worked
        before = time.perf_counter()
        saver.save(Progress(step=step), shared=not locally or step % rhythm.every == 0)
        stood_still.append(time.perf_counter() - before)
    seconds = time.perf_counter() - began
    saver.wait()
    durable += sum(isinstance(item, Saved) for item in saver.news())
    return {"stood_still": stood_still, "seconds": seconds, "lost": lost / rhythm.saves, "durable": durable}


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _configured(config: Config, local: Path | None) -> Config:
    tier = None if local is None else LocalCheckpoint(f"{local}/{dist.get_rank()}")
    return replace(config, checkpoint=Checkpoint(keep=1, local=tier))


def _tier(config: Config, folder: Path, group: HostGroup) -> Tier | None:
    return Tier(config, folder, group, node=f"node-{dist.get_rank()}") if config.checkpoint.local else None


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
            case SavedLocally() | Served():
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
