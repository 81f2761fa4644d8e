"""Local checkpoints: first to a folder of every node, with a copy on the next node; from there to the shared folder.

A local checkpoint has the files and the manifest of any other. On a node are the files of its own ranks, those of the
node before it, and all that is small. It is complete when every node has given it its name. Nothing is loaded from the
nodes: at a start, `megalite.checkpoint.local.rescue` copies the newest that is whole to the shared folder.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from time import monotonic

from megalite.base.errors import InputError
from megalite.checkpoint.local.folder import MAX_CHECKPOINTS, Life, LocalFolder
from megalite.checkpoint.local.nodes import Nodes
from megalite.checkpoint.local.replicate import FileExchange
from megalite.checkpoint.publish import Publisher
from megalite.checkpoint.store.disk import total_bytes, write_durably
from megalite.checkpoint.store.files import copy, write_bytes
from megalite.checkpoint.store.host_group import ElsewhereError, HostGroup
from megalite.checkpoint.store.manifest import MANIFEST, Manifest
from megalite.checkpoint.store.save_events import Failed, LocalOff, Outcome, Saved, SavedLocally
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.distributed.start.host import host_memory
from megalite.plan.memory.held import HOST_MEMORY
from megalite.plan.memory.peak import memory_of_ranks
from megalite_launch.base.run_folder import node_name
from megalite_launch.base.texts import memory_text


@dataclass(frozen=True)
class WrittenFolders:
    """Files that all ranks have written into their nodes' folders."""

    manifest: Manifest
    small: Mapping[str, bytes]  # files that every node gets
    names: Sequence[Sequence[str]]  # names of the files of every rank


@dataclass(frozen=True)
class KeptCheckpoint:
    """A local checkpoint that is complete."""

    manifest: Manifest
    path: Path  # on this node
    names: tuple[str, ...]  # files that this rank copies to the shared folder
    began: float


class Tier:
    """The local checkpoints of a run, whose shared ones are in `folder`. Its methods are collective.

    They are off until `begin`, and afterwards if a node cannot have any. advanced: called as a write proceeds.
    check_owner: called on the first rank before anything in `folder` changes. node: the name of this rank's node.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        group: HostGroup,
        advanced: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
        node: str | None = None,
    ) -> None:
        assert config.checkpoint.local is not None
        self.config, self.local, self.root = config, config.checkpoint.local, root_of(config)
        self.group, self.advanced = group, advanced
        self.publisher = Publisher(folder, config, advanced, check_owner)
        self.nodes = Nodes(group.share(node or node_name()))
        self.due = False  # whether the next local checkpoint is to be copied to the shared folder
        self.begun = False
        self._place: LocalFolder | None = None
        self._latest: KeptCheckpoint | None = None
        self._apart = HostGroup("copies of checkpoints")
        self._copier = ThreadPoolExecutor(1, "copy")
        self.beside, self._copier_beside = ThreadPoolExecutor(1, "flush"), ThreadPoolExecutor(1, "flush")
        self._copies: list[tuple[int, Future[Saved | Failed]]] = []  # copies that were begun; not yet counted
        self._news: deque[Outcome] = deque()

    @property
    def on(self) -> bool:
        """Flag: there are local checkpoints."""
        return self._place is not None

    @property
    def replicas(self) -> int:
        """Number of other nodes that have a copy of a part."""
        return min(self.local.replicas, len(self.nodes) - 1)

    @property
    def leads_node(self) -> bool:
        return self.nodes.leads(self.group.rank)

    def begin(self) -> None:
        """Begin a new life of the run: whatever it has saved on nodes before is deleted, and never read again."""
        self.begun, self.due, self._latest, self._place = True, False, None, None
        try:
            life = self.group.once(self._next_life)
        except InputError as error:
            self._turn_off(str(error))
            self._forget_before()
            return
        place = LocalFolder(self.root, life)
        mark = f"node-{self.nodes.node_of[self.group.rank]}"
        if not self._refused(lambda: place.prepare(mark) if self.leads_node else None) and not self._refused(
            lambda: _check_marks(place, mark)
        ):
            self._place = place

    def _forget_before(self) -> None:
        """Delete what the life before has saved here, since nothing tells that it is over."""
        life = self.group.once(lambda: Life.of(self.publisher.folder))
        if life is not None:
            before = LocalFolder(self.root, life)
            self._refused(lambda: before.forget() if self.leads_node else None)

    def _next_life(self) -> Life:
        self.publisher.check_owner()
        return Life.begin(self.publisher.folder)

    def check_room(self, own: int, on_gpu: bool) -> None:
        """Turn local checkpoints off if a node has no room for them.

        own: bytes that this rank writes each time. on_gpu: whether ranks train on GPUs, and not in host memory.
        """
        if self._place is not None:
            sizes, place = self.group.share(own), self._place
            if self._refused(lambda: self._check_room(place, sizes, on_gpu) if self.leads_node else None):
                self._place = None

    def _check_room(self, place: LocalFolder, sizes: Sequence[int], on_gpu: bool) -> None:
        """Raises InputError if this node has too little room, told with the numbers."""
        node = self.nodes.node_of[self.group.rank]
        ranks = self.nodes.ranks[node]
        own = sum(sizes[rank] for rank in ranks)
        others = sum(sizes[rank] for rank in self.nodes.ranks[self.nodes.before(node)]) if self.replicas else 0
        needed = MAX_CHECKPOINTS * (own + others)
        what = f"{memory_text(needed)}, for {MAX_CHECKPOINTS} times {memory_text(own)} of its own ranks"
        what += f" and {memory_text(others)} of the node before it" if others else ""
        if (room := place.room()) < needed:
            raise InputError(f"needs {what}, and has {memory_text(room)} of room")
        if place.in_memory:
            whole, taken = host_memory(), _memory_of(self.config, len(ranks), on_gpu)
            if needed + taken > whole:
                beside = f"{len(ranks)} ranks, which take about {memory_text(taken)}"
                raise InputError(f"is memory; it needs {what}, beside {beside}, and the node has {memory_text(whole)}")

    def _refused(self, work: Callable[[], None]) -> bool:
        """Run `work` on every rank. Returns whether it has failed on any; then it turns local checkpoints off."""
        name = self.nodes.names[self.nodes.node_of[self.group.rank]]
        problems = list(filter(None, self.group.share(_problem_of(work, name))))
        if problems:
            others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            self._turn_off(f"{problems[0]}{others}")
        return bool(problems)

    def _turn_off(self, why: str) -> None:
        told = (
            f"checkpoint.local.path = {self.local.path}: {why}; until the next start, only shared checkpoints are saved"
        )
        self._news.append(LocalOff(told))

    def save(self, step: int, write: Callable[[Path], WrittenFolders], began: float) -> SavedLocally:
        """Save on all nodes. Raises ValueError, or ElsewhereError, on all ranks; then nothing is left.

        write: writes into the folder that it is given, on all ranks. began: when staging had ended.
        """
        place = self._place
        assert place is not None
        token = self.group.once(lambda: randbits(48))
        partial, final = place.partial_of(step, token), place.path_of(step)
        try:
            self.group.everywhere(lambda: place.make_way(partial, self._pinned()) if self.leads_node else None)
            written = write(partial)
            files = written.manifest.files
            self.group.everywhere(lambda: self._write_small(partial, written))
            if self.replicas:
                exchange = FileExchange(
                    self.group, self.nodes, partial, files, written.names, self.beside, self.advanced
                )
                self.group.everywhere(exchange.run)
            self.group.everywhere(lambda: place.publish(partial, final) if self.leads_node else None)
        except (ValueError, ElsewhereError):
            if self.leads_node:
                place.discard(partial)
            raise
        own = written.names[self.group.rank]
        names = (*own, *written.small) if self.group.leads else tuple(own)
        self._latest = KeptCheckpoint(written.manifest, final, names, began)
        return SavedLocally(step, final, total_bytes(files.values()), monotonic() - began, self.replicas)

    def _write_small(self, partial: Path, written: WrittenFolders) -> None:
        if self.leads_node:
            if not self.group.leads:  # the first rank has written them
                write_bytes(partial, written.small)
            write_durably(partial / MANIFEST, written.manifest.render())

    def copy_if_due(self, at_once: bool = False) -> list[Saved | Failed]:
        """Begin to copy the latest local checkpoint to the shared folder, if one is due and none is under way.

        Does not wait for it, but with `at_once` for one that is under way; else a later checkpoint is taken, as soon as
        that has ended. Returns what has come of those before, the same on all ranks.
        """
        latest = self._latest
        if not self.due or latest is None:
            return []
        if not at_once and not self.group.once(lambda: all(copy.done() for _, copy in self._copies)):
            return []
        ended, self.due = self.wait(), False
        self._copies.append((latest.manifest.step, self._copier.submit(self._copy, latest)))
        return ended

    def wait(self) -> list[Saved | Failed]:
        """Wait for the copies that were begun. Returns what has come of them, the same on all ranks."""
        ended, self._copies = [copy.result() for _, copy in self._copies], []
        return ended

    def news(self) -> Iterable[Outcome]:
        """Yield the outcomes that have come since the last call."""
        while self._news:
            yield self._news.popleft()

    def forget(self) -> None:
        """Delete everything on the nodes: all of it is in the shared folder."""
        if (place := self._place) is not None:
            self._refused(lambda: place.forget() if self.leads_node else None)

    def close(self) -> None:
        """End the threads, once they have nothing to do."""
        for threads in (self._copier, self.beside, self._copier_beside):
            threads.shutdown(wait=False)

    def _pinned(self) -> int | None:
        """The step that is being copied."""
        return next((step for step, copy in self._copies if not copy.done()), None)

    def _copy(self, kept: KeptCheckpoint) -> Saved | Failed:
        outcome = self._copied(kept)
        self._news.append(outcome)
        return outcome

    def _copied(self, kept: KeptCheckpoint) -> Saved | Failed:
        """Copy a checkpoint from the nodes to the shared folder, in a thread on all ranks."""
        group, publisher, manifest = self._apart, self.publisher, kept.manifest
        final = publisher.path_of(manifest.step)
        partial: Path | None = None
        try:
            partial = group.once(lambda: publisher.make_way(final))
            target = partial

            def copy_mine() -> None:
                for name in kept.names:
                    copy(name, manifest.files[name], kept.path, target, self._copier_beside, self.advanced)

            group.everywhere(copy_mine)
            size, problems = group.once(lambda: publisher.publish(target, final, manifest))
        except (ValueError, ElsewhereError) as error:
            if group.leads and partial is not None:
                publisher.discard(partial)
            return Failed(manifest.step, f"{final}: {error}")
        return Saved(manifest.step, final, size, monotonic() - kept.began, problems)


def root_of(config: Config) -> Path:
    """The folder of this node that local checkpoints of all runs lie in."""
    assert config.checkpoint.local is not None
    return Path(config.checkpoint.local.path)


def _problem_of(work: Callable[[], None], node: str) -> str:
    try:
        work()
    except (OSError, InputError) as error:
        return f"node {node}: {error}"
    return ""


def _check_marks(place: LocalFolder, mark: str) -> None:
    """Raises InputError unless all ranks of this node, and no other node, see the folder."""
    marks = place.marks()
    if mark not in marks:
        raise InputError(f"{place.folder} is not there for all ranks of the node; their containers must share it")
    if marks != [mark]:
        raise InputError(
            f"{place.root} is the same folder on {len(marks)} nodes; name one that each node has for itself"
        )


def _memory_of(config: Config, ranks: int, on_gpu: bool) -> int:
    """Bytes of host memory that `ranks` ranks of a node are predicted to take, as an average over pipeline ranks."""
    memories = memory_of_ranks(config, costing_of(config))
    found = (sum(each.of(HOST_MEMORY).values()) + (0 if on_gpu else each.total) for each in memories)
    return sum(found) * ranks // len(memories)
