"""Saving: the state is staged to the host, written in the background, and published by one rename when on the disk."""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megalite.base.errors import InputError, Unhealthy
from megalite.base.secrets import shareable, without_secrets
from megalite.checkpoint.local.tier import Tier, WrittenFolders
from megalite.checkpoint.publish import Publisher
from megalite.checkpoint.run.save_plan import Planner, WriterPlan, local_parts, written_bytes
from megalite.checkpoint.run.staging import Staging
from megalite.checkpoint.store.disk import File
from megalite.checkpoint.store.files import METADATA, Writer
from megalite.checkpoint.store.finite import PoisonedError, refuse_poisoned
from megalite.checkpoint.store.host_group import ElsewhereError, HostGroup
from megalite.checkpoint.store.index import Index, merged
from megalite.checkpoint.store.manifest import INDEX, Manifest, Source
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Failed, FailedLocally, Outcome, Saved
from megalite.checkpoint.store.state import State, is_state, progress_tensors, use_device
from megalite.checkpoint.weights.export import is_due
from megalite.checkpoint.weights.merged import BASE
from megalite.config.convert import to_plain
from megalite.config.layout import AXES
from megalite.config.schema import Config
from megalite.optim.interface import rate_of
from megalite.optim.scratch_file import ScratchFile
from megalite.plan.state_streams import padded

VERSIONS = ("megalite", "torch")
CONTINUATION_HINT = "when that is fixed, the same command continues from the newest"


@dataclass(frozen=True)
class EndedWrites:
    """Outcomes of what the writer's thread has finished."""

    own: list[Outcome]
    copies: list[Saved | Failed] = field(default_factory=list)  # outcomes of copying local checkpoints; told already


Part = tuple[list[WriteResult], Index, dict[str, File]]  # results, index and files of what a rank has written


class Saver:
    """Writes the checkpoints of a run into `folder`, one at a time. Its methods are collective.

    It is a context manager: a save that is under way when it ends is durable afterwards, unless the job is failing.
    data: the sources that `Progress.samples` counts in. advanced: called as a write proceeds, from its thread.
    check_owner: called in that thread on the first rank, before anything in `folder` is renamed or deleted; does not
    return if the folder has become another job's. tier: for local checkpoints.
    base: the number of the model beside which adapters are trained; None: there are none.
    """

    def __init__(
        self,
        state: State,
        config: Config,
        data: tuple[Source, ...],
        folder: Path,
        group: HostGroup,
        advanced: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
        tier: Tier | None = None,
        base: int | None = None,
    ) -> None:
        self.state, self.config, self.data, self.folder = state, config, data, folder
        self._base = {} if base is None else {BASE: torch.tensor(base)}
        self._group, self._advanced, self._tier = group, advanced, tier
        self._publisher = tier.publisher if tier else Publisher(folder, config, advanced, check_owner)
        self._plan: WriterPlan | None = None
        assert state.optimizer is not None
        self._staging = Staging(state.optimizer, self._staging_file())
        self._writer = ThreadPoolExecutor(1, "checkpoint", use_device, (state.device,))
        self._beside = ThreadPoolExecutor(1, "flush")
        self.wrote: float | None = None  # seconds that the latest complete checkpoint took to write
        self._pending: Future[EndedWrites] | None = None
        self._ended: list[Outcome] = []
        self._failed: list[Failed] = []  # in a row, up to the latest
        self._rehearse()
        if tier is not None:
            self._begin(tier)
        reserves = state.device.type == "cuda" and config.checkpoint.async_
        self._reserved = (
            self._writer.submit(self._staging.reserve, local_parts(state.tensors())) if reserves else None
        )  # beside the first steps

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Unhealthy):  # the other ranks are well and wait for theirs too
            self.wait()
            if kind is None:
                self._copy_rest()
        self._writer.shutdown(wait=False)
        self._beside.shutdown(wait=False)
        if self._tier is not None:
            self._tier.close()
        self._staging.close()

    def _staging_file(self) -> ScratchFile | None:
        """A file for copies of states that live in files; None if there are none, or nothing is copied."""
        if self.config.optim.place != "files" or not self.config.checkpoint.async_:
            return None
        parts = local_parts(self.state.tensors())
        size = sum(padded(part.nbytes) for name, part in parts.items() if is_state(name))
        return ScratchFile(self.config.optim.placement, size, "optim.placement")

    def _begin(self, tier: Tier) -> None:
        """Begin with local checkpoints, once the state is loaded from which the run goes on."""
        if not tier.begun:
            tier.begin()
        if tier.on:
            self._plan = self._make_plan(self.state.tensors())
            tier.check_room(written_bytes(self._plan.mine), self.state.device.type == "cuda")

    def _rehearse(self) -> None:
        """Raises InputError if a checkpoint could not hold this configuration, or not be read again."""
        try:
            progress_tensors(Progress(), 0.0, self.config.run.seed)
            Manifest.parse(
                self.folder / "step-00000000", self._manifest(Progress(), {INDEX: File(0, "0" * 32)}).render().encode()
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"a checkpoint could not hold this configuration: {error}") from error

    @property
    def local(self) -> bool:
        """Flag: checkpoints are saved on the nodes."""
        return self._tier is not None and self._tier.on

    def save(self, progress: Progress, shared: bool = True) -> None:
        """Stage the state, and write it: in the background, or at once without `checkpoint.async`.

        shared: to the shared folder; where there are local checkpoints, to the nodes first. Else to the nodes alone.

        Waits until the save before is written; its copy to the shared folder may go on. Raises Unhealthy if more than
        `checkpoint.max_failures` saves in a row have failed, or if weights or moments are not finite. Tensors on a GPU
        are checked first, which takes a moment. Tensors in host memory are checked when they are about to be written,
        so that training does not wait; then `settle` raises.
        """
        if not (shared or self.local):
            return
        self._wait_for_writer()
        self._refuse_poisoned()
        if len(self._failed) > self.config.checkpoint.max_failures:
            failures, error = len(self._failed), self._failed[-1].error
            raise Unhealthy(f"{failures} checkpoints in a row could not be written: {error}; {CONTINUATION_HINT}")
        tensors = self.state.tensors()
        on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        if self.state.device.type == "cuda":
            try:
                self._group.everywhere(lambda: refuse_poisoned(on_gpu))
            except PoisonedError as error:
                self._note(Failed(progress.step, str(error), poisoned=True))
                self.settle()
        plan = self._plan = self._plan or self._make_plan(tensors)
        plan.planner.staged = self._stage(tensors)
        assert self.state.optimizer is not None
        rate = rate_of(self.state.optimizer)
        extra = progress_tensors(progress, rate, self.config.run.seed) | self._base
        unseen = tensors.keys() - on_gpu.keys()
        self._pending = self._writer.submit(self._write, plan, progress, extra, unseen, shared)
        if not self.config.checkpoint.async_:
            self.settle()

    def news(self) -> list[Outcome]:
        """Return the outcomes that have come since the last call."""
        if self._pending is not None and self._pending.done():
            self._wait_for_writer()
        ended, self._ended = self._ended, []
        ended += self._publisher.news()
        return ended + (list(self._tier.news()) if self._tier is not None else [])

    def finish(self) -> None:
        """Wait until the latest save is durable in the shared folder. Raises Unhealthy if it has failed.

        Nothing of the run is left on the nodes then.
        """
        self.settle()
        self._copy_rest()
        if self._failed:
            raise Unhealthy(f"the last checkpoint could not be written: {self._failed[-1].error}; {CONTINUATION_HINT}")
        if self._tier is not None:
            self._tier.forget()
        self._publisher.finish()

    def settle(self) -> None:
        """Wait until no save is under way. Raises Unhealthy if what was to be saved is not finite."""
        self.wait()
        self._refuse_poisoned()

    def _refuse_poisoned(self) -> None:
        for failed in self._failed:
            if failed.poisoned:
                raise Unhealthy(f"step {failed.step}: {failed.error}; it is not saved")

    def wait(self) -> None:
        """Wait until no save is under way, nor a copy to the shared folder, whatever its outcome."""
        self._wait_for_writer()
        if self._tier is not None:
            self._count(self._tier.wait())

    def _wait_for_writer(self) -> None:
        if self._pending is not None:
            ended = self._pending.result()
            self._pending = None
            self._ended += ended.own
            self._count([*ended.copies, *ended.own])

    def _copy_rest(self) -> None:
        """Copy the latest local checkpoint to the shared folder, if that is still due, and wait for it."""
        if self._tier is not None:
            self._count(self._tier.copy_if_due())
            self._count(self._tier.wait())

    def _note(self, outcome: Failed) -> None:
        self._ended.append(outcome)
        self._count([outcome])

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        """Count the failures in a row of shared checkpoints. All ranks count the same at the same time."""
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                self._failed.append(outcome)
            elif isinstance(outcome, Saved):
                self._failed = [failed for failed in self._failed if failed.poisoned]
                self.wrote = outcome.seconds

    def _make_plan(self, tensors: dict[str, Tensor]) -> WriterPlan:
        group, planner = self._group, Planner(flatten_state_dict=False)
        planner.set_up_planner(tensors, None, group.leads)
        local = group.gather(planner.create_local_plan())
        plans, metadata = None, None
        if local is not None:
            plans, metadata = planner.create_global_plan(local)
            plans = self._files(self.folder).prepare_global_plan(plans)
        return WriterPlan(planner, planner.finish_plan(group.scatter(plans)), metadata)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's parts, in host memory that the next save uses again."""
        parts = local_parts(tensors)
        if not self.config.checkpoint.async_:
            return parts  # they stay as they are until all is written
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        return self._staging.copy(parts)

    def _write(
        self, plan: WriterPlan, progress: Progress, extra: dict[str, Tensor], unseen: Set[str], shared: bool
    ) -> EndedWrites:
        """Write a checkpoint, in the writer's thread on all ranks; return what ended. unseen: still to check for NaN.

        shared: whether it is to be in the shared folder too, if it is written to the nodes first.
        """
        self._staging.wait()
        began, tier = monotonic(), self._tier
        if tier is None or not tier.on:
            return EndedWrites([self._write_shared(plan, progress, extra, unseen, began)])
        tier.due |= shared

        def write(folder: Path) -> WrittenFolders:
            return self._write_to_nodes(folder, plan, progress, extra, unseen)

        try:
            saved = tier.save(progress.step, write, began)
        except PoisonedError as error:
            return EndedWrites([Failed(progress.step, str(error), poisoned=True)])
        except (ValueError, ElsewhereError) as error:  # on all ranks; a lost peer is something else
            failed = FailedLocally(progress.step, str(error))
            if not tier.due:
                return EndedWrites([failed])
            tier.due = False
            copies = tier.wait()  # only one can write to the shared folder at a time
            return EndedWrites([failed, self._write_shared(plan, progress, extra, unseen, began)], copies)
        return EndedWrites([saved], tier.copy_if_due(at_once=shared and self._lasts(progress.step)))

    def _lasts(self, step: int) -> bool:
        """Return whether the checkpoint of this very step is wanted, not only a new one."""
        checkpoint = self.config.checkpoint
        every = checkpoint.keep_every
        kept = (every > 0 and step % every == 0) or step in checkpoint.at
        return kept or is_due(checkpoint, step, self.config.train.steps)

    def _write_shared(
        self, plan: WriterPlan, progress: Progress, extra: dict[str, Tensor], unseen: Set[str], began: float
    ) -> Saved | Failed:
        """Write a checkpoint to the shared folder. began: when staging had ended."""
        publisher = self._publisher
        final = publisher.path_of(progress.step)
        partial: Path | None = None
        try:
            partial = self._group.once(lambda: publisher.make_way(final))
            writer = self._files(partial)
            written = self._write_parts(writer, plan, extra, unseen)

            def publish() -> tuple[int, tuple[str, ...]]:
                return publisher.publish(Path(writer.path), final, self._finish(writer, plan, progress, written))

            size, problems = self._group.once(publish)
        except (ValueError, ElsewhereError, Unhealthy) as error:  # on all ranks; a lost peer is something else
            if self._group.leads and partial is not None:
                publisher.discard(partial)
            if isinstance(error, Unhealthy):  # states are lost, so a later save would fail as well
                raise
            poisoned = isinstance(error, PoisonedError)
            return Failed(progress.step, str(error) if poisoned else f"{final}: {error}", poisoned)
        return Saved(progress.step, final, size, monotonic() - began, problems)

    def _write_to_nodes(
        self, folder: Path, plan: WriterPlan, progress: Progress, extra: dict[str, Tensor], unseen: Set[str]
    ) -> WrittenFolders:
        """Write a checkpoint's files into `folder`, which is another one on every node."""
        writer = self._files(folder)
        written = self._write_parts(writer, plan, extra, unseen)

        def finish() -> WrittenFolders:
            names = [tuple(found) for *_, found in written]
            manifest = self._finish(writer, plan, progress, written)
            small = {name: (folder / name).read_bytes() for name in (INDEX, METADATA)}
            return WrittenFolders(manifest, small, names)

        return self._group.once(finish)

    def _files(self, folder: Path) -> Writer:
        return Writer(folder, self._beside, self._advanced)

    def _write_parts(self, writer: Writer, plan: WriterPlan, extra: dict[str, Tensor], unseen: Set[str]) -> list[Part]:
        """Write the parts of all ranks. Returns on the first rank what each has written."""
        results, index = self._group.everywhere(lambda: self._write_mine(writer, plan, extra, unseen))
        return self._group.gather((results, index, writer.written)) or []

    def _write_mine(
        self, writer: Writer, plan: WriterPlan, extra: dict[str, Tensor], unseen: Set[str]
    ) -> tuple[list[WriteResult], Index]:
        refuse_poisoned({name: part for name, part in plan.planner.staged.items() if name in unseen})
        mine = plan.mine
        if plan.metadata is not None:  # the first rank adds what is small, and changes its shape
            plans, metadata = create_default_global_save_plan([create_default_local_save_plan(extra, True)])
            plan.metadata.state_dict_metadata |= metadata.state_dict_metadata
            plan.planner.staged = {**plan.planner.staged, **extra}
            mine = SavePlan([*mine.items, *plans[0].items], mine.storage_data)
        return writer.write(mine, plan.planner)

    def _finish(self, writer: Writer, plan: WriterPlan, progress: Progress, written: list[Part]) -> Manifest:
        """Write the indexes of a checkpoint, on the first rank, when all have written. Returns its manifest."""
        assert plan.metadata is not None
        writer.finish(plan.metadata, [results for results, _, _ in written])
        writer.write_index(merged(index for _, index, _ in written))
        files = {
            name: file
            for found in [*(found for *_, found in written), writer.written]
            for name, file in sorted(found.items())
        }
        return self._manifest(progress, files)

    def export_missing(self, step: int) -> tuple[str, ...]:
        """Export the checkpoint of `step`, from which the run goes on, if that is due and not done.

        Collective. Returns what has failed.
        """
        return tuple(self._group.once(lambda: self._publisher.export_missing(step)))

    def _manifest(self, progress: Progress, files: dict[str, File]) -> Manifest:
        return Manifest(
            step=progress.step,
            tokens=progress.tokens,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=self._group.ranks,
            layout={axis: getattr(self.config.parallel.layout, axis) for axis in AXES},
            versions={name: version(name) for name in VERSIONS},
            config=shareable(to_plain(self.config)),  # others read checkpoints
            data=tuple(replace(source, path=without_secrets(source.path)) for source in self.data),
            files=files,
        )
