"""Saving: the state is staged to the host, written in the background, and published by one rename when on the disk."""

import os
import shutil
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from megalite.checkpoint.disk import File, synchronize, total_bytes, write_durably
from megalite.checkpoint.export import export, export_of, is_due
from megalite.checkpoint.files import Writer
from megalite.checkpoint.finite import PoisonedError, refuse_poisoned
from megalite.checkpoint.host_group import ElsewhereError, HostGroup
from megalite.checkpoint.index import Index, merged
from megalite.checkpoint.manifest import INDEX, MANIFEST, Manifest, Source
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.retain import new_partial, retain, sweep
from megalite.checkpoint.state import State, progress_tensors, use_device
from megalite.config.convert import to_plain
from megalite.config.errors import InputError, Unhealthy
from megalite.config.files import exists
from megalite.config.schema import Config
from megalite.parallel.host_memory import HostMemory

VERSIONS = ("megalite", "torch")
MEND = "when that is mended, the same command continues from the newest"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete, and durable if there are no problems."""

    step: int
    path: Path
    bytes: int
    seconds: float  # from the end of staging
    problems: tuple[str, ...]  # of flushing its name and of deleting others; each is told once


@dataclass(frozen=True)
class Failed:
    """A checkpoint that could not be written; nothing is left of it."""

    step: int
    error: str
    poisoned: bool = False  # what was to be saved is not finite: nobody could go on from that


@dataclass
class Plan:
    """Which rank writes what. It is made once, as a run's tensors keep their names and shapes."""

    planner: "Planner"
    mine: SavePlan
    metadata: Metadata | None  # on the first rank


class Planner(DefaultSavePlanner):
    """Plans with DTensors, and writes the tensors that are staged for them."""

    staged: Mapping[str, Tensor]

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.staged[index.fqn].contiguous()  # the index tells of whole rows


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of weights and moments. A save copies all of it, whichever rank writes it."""
    return {name: tensor.to_local() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


class Saver:
    """Writes the checkpoints of a run into `folder`, one at a time. Its methods are collective.

    It is a context manager: a save that is under way when it ends is durable afterwards, unless the job is failing.
    data: the sources that `Progress.samples` counts in. advanced: called as a write proceeds, from its thread.
    check_owner: called in that thread on the first rank, before anything in `folder` is renamed or deleted; does not
    return if the folder has become another job's.
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
    ) -> None:
        self.state, self.config, self.data, self.folder = state, config, data, folder
        self._group, self._advanced, self._check_owner = group, advanced, check_owner
        self._plan: Plan | None = None
        self._memory = HostMemory()
        self._staged: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, "checkpoint", use_device, (state.device,))
        self._beside = ThreadPoolExecutor(1, "flush")
        self.wrote: float | None = None  # seconds that the latest complete checkpoint took to write
        self._pending: Future[Saved | Failed] | None = None
        self._ended: list[Saved | Failed] = []
        self._failed: list[Failed] = []  # in a row, up to the latest
        self._told: set[str] = set()  # problems that were told
        self._rehearse()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Unhealthy):  # the other ranks are well and wait for theirs too
            self.wait()
        self._writer.shutdown(wait=False)
        self._beside.shutdown(wait=False)
        self._memory.close()

    def _rehearse(self) -> None:
        """Raises InputError if a checkpoint could not hold this configuration, or not be read again."""
        try:
            progress_tensors(Progress(), 0.0, self.config.run.seed)
            Manifest.parse(
                self.folder / "step-00000000", self._manifest(Progress(), {INDEX: File(0, "0" * 32)}).render().encode()
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"a checkpoint could not hold this configuration: {error}") from error

    def save(self, progress: Progress) -> None:
        """Stage the state, and write it: in the background, or at once without `checkpoint.async`.

        Waits for the save before. Raises Unhealthy if more than `checkpoint.max_failures` saves in a row have failed,
        or if weights or moments are not finite. Those on a GPU are checked first, which takes a moment. Those in host
        memory are checked when they are about to be written, so that training does not wait; then `settle` raises.
        """
        self.settle()
        if len(self._failed) > self.config.checkpoint.max_failures:
            failures, error = len(self._failed), self._failed[-1].error
            raise Unhealthy(f"{failures} checkpoints in a row could not be written: {error}; {MEND}")
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
        rate = self.state.optimizer.param_groups[0]["lr"]
        extra = progress_tensors(progress, float(rate), self.config.run.seed)
        unseen = tensors.keys() - on_gpu.keys()
        self._pending = self._writer.submit(self._write, plan, progress, extra, unseen)
        if not self.config.checkpoint.async_:
            self.settle()

    def news(self) -> list[Saved | Failed]:
        """The saves that have ended since this was last asked."""
        if self._pending is not None and self._pending.done():
            self.wait()
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> None:
        """Wait until the save that is under way is durable. Raises Unhealthy if the latest save has failed."""
        self.settle()
        if self._failed:
            raise Unhealthy(f"the last checkpoint could not be written: {self._failed[-1].error}; {MEND}")

    def settle(self) -> None:
        """Wait until no save is under way. Raises Unhealthy if what was to be saved is not finite."""
        self.wait()
        if self._failed and (latest := self._failed[-1]).poisoned:
            raise Unhealthy(f"step {latest.step}: {latest.error}; it is not saved")

    def wait(self) -> None:
        """Wait until no save is under way, whatever its outcome."""
        if self._pending is not None:
            outcome = self._pending.result()
            self._pending = None
            self._note(outcome)

    def _note(self, outcome: Saved | Failed) -> None:
        self._ended.append(outcome)
        if isinstance(outcome, Saved):
            self.wrote = outcome.seconds
        self._failed = [*self._failed, outcome] if isinstance(outcome, Failed) else []

    def _make_plan(self, tensors: dict[str, Tensor]) -> Plan:
        group, planner = self._group, Planner(flatten_state_dict=False)
        planner.set_up_planner(tensors, None, group.leads)
        local = group.gather(planner.create_local_plan())
        plans, metadata = None, None
        if local is not None:
            plans, metadata = planner.create_global_plan(local)
            plans = self._files(self.folder).prepare_global_plan(plans)
        return Plan(planner, planner.finish_plan(group.scatter(plans)), metadata)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's parts, in host memory that the next save uses again."""
        parts = local_parts(tensors)
        if not self.config.checkpoint.async_:
            return parts  # they stay as they are until all is written
        for name, part in parts.items():
            if name not in self._staged:
                self._staged[name] = self._memory.empty_like(part)
            self._staged[name].copy_(part, non_blocking=True)
        if self.state.device.type == "cuda":
            torch.cuda.current_stream(self.state.device).synchronize()
        return self._staged

    def _write(self, plan: Plan, progress: Progress, extra: dict[str, Tensor], unseen: Set[str]) -> Saved | Failed:
        """Write a checkpoint, in the writer's thread on all ranks; the outcome. unseen: still to check for NaN."""
        began = monotonic()
        final = self.folder / f"step-{progress.step:08d}"
        partial: Path | None = None
        try:
            partial = self._group.once(lambda: self._make_way(final))
            writer = self._files(partial)
            results, index = self._group.everywhere(lambda: self._write_mine(writer, plan, extra, unseen))
            written = self._group.gather((results, index, writer.written))
            size, problems = self._group.once(lambda: self._publish(writer, plan, progress, written or [], final))
        except (ValueError, ElsewhereError) as error:  # on all ranks; a lost peer is something else
            if self._group.leads and partial is not None:
                with suppress(OSError):  # the next save tries again
                    self._check_owner()
                    shutil.rmtree(partial)
            poisoned = isinstance(error, PoisonedError)
            return Failed(progress.step, str(error) if poisoned else f"{final}: {error}", poisoned)
        return Saved(progress.step, final, size, monotonic() - began, problems)

    def _files(self, folder: Path) -> Writer:
        return Writer(folder, self._beside, self._advanced)

    def _make_way(self, final: Path) -> Path:
        """Make room for a checkpoint. Returns the new folder in which it is to be written."""
        self._check_owner()
        if os.path.lexists(final):
            raise FileExistsError(f"{final} is there already")
        sweep(self.folder)  # what cannot be deleted is told when the checkpoint is published
        partial = new_partial(final)
        synchronize(self.folder.parent)
        return partial

    def _write_mine(
        self, writer: Writer, plan: Plan, extra: dict[str, Tensor], unseen: Set[str]
    ) -> tuple[list[WriteResult], Index]:
        refuse_poisoned({name: part for name, part in plan.planner.staged.items() if name in unseen})
        mine = plan.mine
        if plan.metadata is not None:  # the first rank adds what is small, and changes its shape
            plans, metadata = create_default_global_save_plan([create_default_local_save_plan(extra, True)])
            plan.metadata.state_dict_metadata |= metadata.state_dict_metadata
            plan.planner.staged = {**plan.planner.staged, **extra}
            mine = SavePlan([*mine.items, *plans[0].items], mine.storage_data)
        return writer.write(mine, plan.planner)

    def _publish(
        self,
        writer: Writer,
        plan: Plan,
        progress: Progress,
        written: list[tuple[list[WriteResult], Index, dict[str, File]]],
        final: Path,
    ) -> tuple[int, tuple[str, ...]]:
        """Publish a checkpoint, on the first rank, when all have written. Returns its bytes and later failures."""
        assert plan.metadata is not None
        partial = Path(writer.path)
        writer.finish(plan.metadata, [results for results, _, _ in written])
        writer.write_index(merged(index for _, index, _ in written))
        files = {
            name: file
            for found in [*(found for *_, found in written), writer.written]
            for name, file in sorted(found.items())
        }
        for name, file in files.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != file.bytes:
                raise OSError(f"{partial / name} is not whole here; do all nodes share this file system?")
        write_durably(partial / MANIFEST, self._manifest(progress, files).render())
        synchronize(partial)
        self._check_owner()
        partial.rename(final)
        problems = [problem for problem in self._after_publishing(final, progress.step) if problem not in self._told]
        self._told.update(problems)
        return total_bytes(files.values()), tuple(problems)

    def _after_publishing(self, final: Path, step: int) -> list[str]:
        """Flush the name of a checkpoint, which is complete by now, export it, and delete older ones.

        Returns what has failed.
        """
        try:
            synchronize(self.folder)
        except OSError as error:
            return [f"{final} may not survive a crash of this machine, so nothing older is deleted: {error}"]
        problems = self._export(final, step)
        try:
            self._check_owner()
            checkpoint = self.config.checkpoint
            return problems + retain(self.folder, step, checkpoint.keep, checkpoint.keep_every)
        except (OSError, InputError) as error:
            return [*problems, f"{self.folder}: old checkpoints cannot be deleted: {error}"]

    def export_missing(self, step: int) -> tuple[str, ...]:
        """Export the checkpoint of `step`, from which the run goes on, if that is due and not done.

        Collective. Returns what has failed.
        """
        final = self.folder / f"step-{step:08d}"
        missing = self._group.once(lambda: exists(final) and not exists(export_of(final)))
        return tuple(self._group.once(lambda: self._export(final, step))) if missing else ()

    def _export(self, final: Path, step: int) -> list[str]:
        """Export the checkpoint `final` if that is due. Returns what has failed."""
        if not is_due(self.config.checkpoint, step, self.config.train.steps):
            return []
        try:
            self._check_owner()
            export(final, self.config, self._advanced)
        except (OSError, InputError) as error:
            return [f"{final} cannot be exported: {error}; megalite-convert can do it later"]
        return []

    def _manifest(self, progress: Progress, files: dict[str, File]) -> Manifest:
        return Manifest(
            step=progress.step,
            tokens=progress.tokens,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=self._group.ranks,
            layout=asdict(self.config.parallel.layout),
            versions={name: version(name) for name in VERSIONS},
            config=to_plain(self.config),
            data=self.data,
            files=files,
        )
