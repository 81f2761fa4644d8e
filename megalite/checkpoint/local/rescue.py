"""Rescue at a start: copies the newest checkpoint that is whole on the nodes together to the shared folder.

From there it is loaded as any other, in any layout, and is as safe as any other before training goes on.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from megalite.base.errors import InputError, Unhealthy, listing
from megalite.base.files import exists
from megalite.checkpoint.local.folder import Held, Life, LocalFolder, digest_of
from megalite.checkpoint.local.tier import Tier
from megalite.checkpoint.store.disk import DamagedError, File, read_whole
from megalite.checkpoint.store.files import copy
from megalite.checkpoint.store.host_group import ElsewhereError
from megalite.checkpoint.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, complete, step_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A checkpoint on the nodes. `holders`: by name of a file, the nodes that have it in full size."""

    step: int
    saved: str
    digest: str
    total: int  # files
    holders: dict[str, list[int]]
    source: int  # a node that has the manifest

    @property
    def missing(self) -> int:
        return self.total - len(self.holders)


class Rescue:
    """Copies checkpoints from the nodes of `tier` to the shared folder. Its methods are collective.

    warn: told on the first rank of what was found and lost.
    """

    def __init__(self, tier: Tier, warn: Say) -> None:
        self.tier, self.group, self.nodes, self.publisher = tier, tier.group, tier.nodes, tier.publisher
        self._warn = warn
        self._tried: set[tuple[int, str]] = set()  # known on the first rank

    def newest(self, before: int | None = None) -> None:
        """Copy the newest checkpoint that is whole, if it is newer than all in the shared folder.

        before: only of a step below this. No checkpoint is tried twice. Raises Unhealthy if the shared folder cannot
        take it: the run does not go on from an older one by itself.
        """
        life = self.group.once(lambda: Life.of(self.publisher.folder))
        if life is None:
            return
        place = LocalFolder(self.tier.root, life)
        here = list(self._held(place)) if self.tier.leads_node else []
        held = self.group.gather(here)
        while choice := self.group.once(lambda: self._choose(held or [], before)):
            if self._take(place, choice):
                return

    def _held(self, place: LocalFolder) -> Iterator[Held]:
        try:
            yield from place.held()
        except (OSError, InputError):  # this node has nothing
            return

    def _choose(self, held: list[list[Held]], before: int | None) -> Candidate | None:
        """The newest checkpoint that is worth a copy and was not tried. Tells of newer ones that are not whole."""
        newest = max((step_of(path) for path in complete(self.publisher.folder)), default=0)
        candidates = _candidates(held, self.nodes.node_of)
        for candidate in sorted(candidates, key=lambda each: (each.step, each.saved), reverse=True):
            key = candidate.step, candidate.digest
            wanted = candidate.step > newest and (before is None or candidate.step < before)
            if not wanted or key in self._tried or exists(self.publisher.path_of(candidate.step), follow=False):
                continue
            self._tried.add(key)
            if not candidate.missing:
                return candidate
            lost = f"of its {candidate.total} files, {candidate.missing} are on none of these nodes"
            self._lost(candidate, f"{lost}: {listing(self.nodes.names, 'and')}")
        return None

    def _lost(self, candidate: Candidate, why: str) -> None:
        if self.group.leads:
            self._warn(f"the local checkpoint of step {candidate.step} is lost: {why}")

    def _take(self, place: LocalFolder, candidate: Candidate) -> bool:
        """Copy a checkpoint to the shared folder. Returns whether that was possible."""
        group, publisher = self.group, self.publisher
        source = self.nodes.leader(candidate.source)
        manifest = group.tell(_manifest(place, candidate) if group.rank == source else None, source)
        if manifest is None:
            self._lost(candidate, "its manifest cannot be read any more")
            return False
        final, told = publisher.path_of(candidate.step), manifest
        partial: Path | None = None
        try:
            target = partial = group.once(lambda: publisher.make_way(final))
            lost = self._copy(place.path_of(candidate.step), target, candidate, manifest.files)
            if not lost:
                _, problems = group.once(lambda: publisher.publish(target, final, told))
        except (InputError, ElsewhereError) as error:
            self._discard(partial)
            raise Unhealthy(
                f"step {candidate.step} is whole on the nodes alone, and cannot be copied to {final}: {error}; "
                "when that is fixed, the same command goes on from it; with checkpoint.local=null, from an older one"
            ) from error
        if lost:
            self._discard(partial)
            self._lost(candidate, lost)
            return False
        if group.leads:
            self._warn(f"step {candidate.step} was whole on the nodes alone; it is copied to {final}")
            for problem in problems:
                self._warn(problem)
        return True

    def _discard(self, partial: Path | None) -> None:
        if self.group.leads and partial is not None:
            self.publisher.discard(partial)

    def _copy(self, source: Path, target: Path, candidate: Candidate, files: dict[str, File]) -> str:
        """Copy all files, each from a node that has it whole. Returns why that is not possible, or an empty text."""
        left = {name: iter(nodes) for name, nodes in sorted(candidate.holders.items())}
        damaged: dict[str, str] = {}
        while left:
            ranks = [cycle(ranks) for ranks in self.nodes.ranks]
            work: list[tuple[str, int]] = []
            for name, nodes in left.items():
                if (node := next(nodes, None)) is None:
                    return damaged[name]
                work.append((name, next(ranks[node])))
            mine = {name: files[name] for name, rank in work if rank == self.group.rank}
            found = self.group.everywhere(lambda mine=mine: self._copy_mine(source, target, mine))  # type: ignore[misc]
            damaged = {name: why for each in self.group.share(found) for name, why in each.items()}
            left = {name: nodes for name, nodes in left.items() if name in damaged}
        return ""

    def _copy_mine(self, source: Path, target: Path, files: dict[str, File]) -> dict[str, str]:
        """Copy some files. Returns by name those that are damaged on this node, and how."""
        damaged = {}
        for name, file in files.items():
            try:
                copy(name, file, source, target, self.tier.beside, self.tier.advanced)
            except DamagedError as error:
                (target / name).unlink(missing_ok=True)
                damaged[name] = f"node {self.nodes.names[self.nodes.node_of[self.group.rank]]}: {error}"
        return damaged


def _candidates(held: Iterable[list[Held]], node_of: list[int]) -> Iterable[Candidate]:
    """Join what the nodes have into candidates. held: by rank; only the rank that leads a node lists its files."""
    found: dict[tuple[int, str], Candidate] = {}
    for rank, here in enumerate(held):
        for each in here:
            blank = Candidate(each.step, each.saved, each.digest, each.total, {}, node_of[rank])
            candidate = found.setdefault((each.step, each.digest), blank)
            for name in each.names:
                candidate.holders.setdefault(name, []).append(node_of[rank])
    return found.values()


def _manifest(place: LocalFolder, candidate: Candidate) -> Manifest | None:
    """The manifest of a checkpoint on this node; None if it is no longer what it was."""
    path = place.path_of(candidate.step)
    try:
        text = read_whole(path, MANIFEST, MAX_MANIFEST_BYTES)
        return Manifest.parse(path, text) if digest_of(text) == candidate.digest else None
    except InputError:
        return None
