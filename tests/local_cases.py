"""Jobs whose eight ranks act as if on several nodes: each node has a folder of its own for local checkpoints."""

import errno
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from toy_jobs import Parts, advance, make, parts, progress_at

from megalite.base.errors import Unhealthy
from megalite.checkpoint.local import replicate
from megalite.checkpoint.local.folder import LocalFolder
from megalite.checkpoint.local.tier import Tier
from megalite.checkpoint.publish import Publisher
from megalite.checkpoint.run.load import Restorer
from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.save_events import FailedLocally, LocalOff, Outcome
from megalite.checkpoint.store.state import State
from megalite.config.schema import Config, LocalCheckpoint
from megalite.train.build import Job

NODES = ("a", "a", "b", "b", "c", "c", "d", "d")  # of the ranks
UNEVEN = ("a", "a", "a", "b", "a", "b", "c", "c")
Told = list[tuple[str, int]]  # kinds and steps of outcomes


def tier_of(config: Config, run: Path, names: Sequence[str] = NODES) -> Tier:
    """The local checkpoints of the run in `run`; each node's folder is `run/nodes/NAME`."""
    name, checkpoint = names[dist.get_rank()], config.checkpoint
    local = checkpoint.local or LocalCheckpoint()
    own = replace(checkpoint, local=replace(local, path=str(run / "nodes" / name), interval=1))
    replicate.PIECE = 1000  # so that files go in several
    return Tier(replace(config, checkpoint=own), run / "checkpoints", HostGroup(), node=name)


def told(news: Sequence[Outcome]) -> Told:
    return [(type(item).__name__, getattr(item, "step", 0)) for item in news]


@contextmanager
def saving(job: Job, run: Path, names: Sequence[str] = NODES) -> Iterator[Saver]:
    """A saver that is left as by a kill: nothing more is copied."""
    tier = tier_of(job.config, run, names)
    state, config = State(job.stages, job.optimizer), tier.config
    yield Saver(state, config, (), run / "checkpoints", tier.group, tier=tier)


def save_on_nodes(
    config: Config, run: Path, shared: Collection[int], last: int, names: Sequence[str] = NODES, more: int = 0
) -> tuple[Told, Parts, Parts]:
    """Save after each of `last` steps, of which those in `shared` go to the shared folder, too.

    Returns what has ended, the tensors then, and those after `more` steps.
    """
    job = make(config)
    news: list[Outcome] = []
    with saving(job, run, names) as saver:
        for step in range(1, last + 1):
            advance(job, step - 1, step)
            saver.save(progress_at(job, step), shared=step in shared)
            saver.wait()
            news += saver.news()
    there = {name: replace(part, values=part.values.clone()) for name, part in parts(job).items()}
    advance(job, last, last + more)
    return told(news), there, parts(job)


def resume(
    config: Config, run: Path, names: Sequence[str] = NODES, last: int = 0, before: int | None = None
) -> tuple[int, list[str], Parts, Parts]:
    """Go on from the newest that is whole anywhere, in a job with other weights, up to the step `last`.

    Returns that step, what was said, the tensors that were loaded, and those at the end.
    """
    job, said = make(replace(config, run=replace(config.run, seed=99))), list[str]()
    tier = tier_of(config, run, names)
    restorer = Restorer(State(job.stages, job.optimizer), tier.config, (), tier.group, tier=tier)
    progress = restorer.newest(run / "checkpoints", said.append, before)
    there = {name: replace(part, values=part.values.clone()) for name, part in parts(job).items()}
    step = progress.step if progress else 0
    job.config.run.seed = config.run.seed
    advance(job, step, max(step, last))
    return step, said, there, parts(job)


def resume_each(config: Config, runs: Sequence[Path]) -> list[tuple[int, list[str]]]:
    """`resume` of one run after the other, without their tensors."""
    return [resume(config, run)[:2] for run in runs]


def refuse_to_load(config: Config, run: Path) -> str:
    """What a start says whose shared folder is full."""

    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(Publisher, "make_way", full):
        try:
            resume(config, run)
        except Unhealthy as error:
            return str(error)
    return ""


def failing_disk(config: Config, run: Path, fails: int, where: str) -> tuple[Told, str]:
    """Save four times; the disk of rank `fails` is full at the second and the third, of which the third is shared."""
    job, broken = make(config), [False]
    publish, keep = LocalFolder.publish, replicate.FileExchange._keep

    def full(original: Any) -> Any:
        def write(*args: Any) -> Any:
            if broken[0] and dist.get_rank() == fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        return write

    patches = {
        "replica": (replicate.FileExchange, "_keep", full(keep)),
        "name": (LocalFolder, "publish", full(publish)),
    }
    news: list[Outcome] = []
    with patch.object(*patches[where]), saving(job, run) as saver:
        for step in range(1, 5):
            broken[0] = step in (2, 3)
            saver.save(progress_at(job, step), shared=step == 3)
            saver.wait()
            news += saver.news()
    return told(news), next(item.error for item in news if isinstance(item, FailedLocally))


def without_room(config: Config, run: Path) -> tuple[Told, str]:
    """Save once to the nodes, and once to the shared folder, where one node has too little room."""
    job = make(config)
    few = dist.get_rank() == 4
    with patch.object(LocalFolder, "room", lambda _: 1000 if few else 1 << 40), saving(job, run) as saver:
        saver.save(progress_at(job, 1), shared=False)
        saver.save(progress_at(job, 2))
        saver.wait()
        news = saver.news()
    return told(news), next(item.error for item in news if isinstance(item, LocalOff))


def one_folder(config: Config, run: Path) -> str:
    """What is said where two nodes have the same folder."""
    tier = tier_of(config, run)
    tier.root = run / "nodes" / "same"
    tier.begin()
    assert not tier.on
    return next(item.error for item in tier.news() if isinstance(item, LocalOff))


def slow_copy(config: Config, run: Path) -> tuple[Told, list[int]]:
    """Save five steps, all shared, while the first copy is held back until the fourth is asked for.

    Returns what has ended, and the steps that were staged meanwhile.
    """
    job, gate, staged = make(config), threading.Event(), list[int]()
    with _held_back(gate), saving(job, run) as saver:
        for step in range(1, 6):
            if step == 4:
                gate.set()
            saver.save(progress_at(job, step))
            if not gate.is_set():
                staged.append(step)
            if step == 4:
                saver.wait()
        saver.finish()
        return told(saver.news()), staged


def lasting(config: Config, run: Path) -> Told:
    """Save four steps, all shared, of which every second is kept forever, while the first copy is slow."""
    config = replace(config, checkpoint=replace(config.checkpoint, keep_every=2))
    job, gate = make(config), threading.Event()
    with _held_back(gate), saving(job, run) as saver:
        threading.Timer(0.3, gate.set).start()
        for step in range(1, 5):
            saver.save(progress_at(job, step))
        saver.finish()
        return told(saver.news())


@contextmanager
def _held_back(gate: threading.Event) -> Iterator[None]:
    """Copies to the shared folder wait for `gate`."""
    copy = Tier._copied

    def held(tier: Tier, kept: Any) -> Any:
        assert gate.wait(60)
        return copy(tier, kept)

    with patch.object(Tier, "_copied", held):
        yield
