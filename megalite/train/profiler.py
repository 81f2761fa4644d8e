"""Profiles the steps `profile.start` to `profile.start + profile.steps − 1` of a run, on `profile.ranks`.

A trace per rank goes to the run folder, `profile/step-N/rank-R.json.gz`, and on CUDA a snapshot of the memory. Nothing
here can end a run.
"""

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from megalite.base.errors import InputError
from megalite.base.files import write_new
from megalite.base.output import warn
from megalite.plan.batches import GlobalBatch
from megalite.plan.pipeline import pairs_up
from megalite.profiling.about import About
from megalite.profiling.breakdown import breakdown
from megalite.profiling.expected import Expected
from megalite.profiling.folder import SNAPSHOT, TRACE, check_no_link, folder_of
from megalite.profiling.tables import parts_table, table_text
from megalite.profiling.trace_file import KEY, read_trace
from megalite.train.build import Job
from megalite.train.metrics import Meter
from megalite.train.order_costs import cluster_of_run
from megalite.train.recording import Recording
from megalite.train.report import Silent

COMPRESSION = 3  # level of gzip: traces shrink to a tenth by it, several times faster than by the highest
MAX_TRACE_BYTES = 32 << 20  # bytes of the longest compressed trace that a run reads; `megalite profile` reads all


class Profiler:
    """Follows the steps of a start. A context manager, which leaves nothing switched on if the run ends in between.

    begun: the step at which the start begins. check_owner: called before a file is written; does not return if the run
    folder has become another job's.
    """

    def __init__(self, job: Job, run: Path, begun: int, check_owner: Callable[[], None]) -> None:
        asked = job.config.profile
        self.job, self._check_owner = job, check_owner
        self.first, self.last = asked.start, asked.start + asked.steps - 1
        self.folder = folder_of(run, self.first)
        self._recording: Recording | None = None
        self._latest = begun  # step
        self._meter: Meter | None = None  # counts the steps since the start, or since the latest rollback

    @staticmethod
    def of(job: Job, run: Path, begun: int, check_owner: Callable[[], None]) -> "Profiler | None":
        """The profiler of this rank; None if it has nothing to record."""
        asked = job.config.profile
        wanted = asked.ranks == "all" or job.mesh.rank in asked.ranks
        return Profiler(job, run, begun, check_owner) if begun < asked.start and wanted else None

    def __enter__(self) -> "Profiler":
        if self._latest == self.first - 1:
            with self._harmless():
                self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._harmless():
            self._end()

    def stepped(self, step: int, batch: GlobalBatch, meter: Meter, report: Silent) -> None:
        """Begin or end to record, after a step. Time that this takes is not counted as training."""
        # A step that was taken back is not followed. Steps after it may have the same number, and another meter.
        consecutive = step == self._latest + 1 and self._meter in (None, meter)
        self._latest, self._meter = step, meter
        with self._harmless():
            if not consecutive and self._end() is not None:
                warn(f"steps {self.first} to {self.last} are not profiled, as the run went back before step {step}")
            if step == self.first - 1:
                with meter.paused():
                    self._begin()
            elif step == self.last and self._recording is not None:
                with meter.paused():
                    self._write(report)

    def _begin(self) -> None:
        mesh, axes = self.job.mesh, self.job.mesh.axes
        if self.job.capture is not None:
            axes[""] = "tp"  # kernels of a CUDA graph name no group, and there are no others in it
        about = About(mesh.rank, self.first, self.last, mesh.layout.pp, mesh.coordinates, axes, self._expected())
        turns = pairs_up(self.job.config)  # a forward that takes turns with a backward has a thread of its own
        self._recording = Recording(self.job.activity, mesh.device, turns, **{KEY: json.dumps(about.plain())})

    def _end(self) -> Recording | None:
        """Stop recording. Returns what was recorded; None if nothing was."""
        ended, self._recording = self._recording, None
        if ended is not None:
            ended.end()
        return ended

    def _write(self, report: Silent) -> None:
        recording, rank = self._end(), self.job.mesh.rank
        assert recording is not None
        self.job.activity("writing a profile")  # not before: the last step's note ends when the device is done with it
        content = compressed(recording)
        self._check_owner()
        check_no_link(self.folder)
        path = self.folder / TRACE.format(rank=rank)
        write_new(path, content)
        if recording.snapshot is not None:
            write_new(self.folder / SNAPSHOT.format(rank=rank), recording.snapshot)
        if rank == 0:
            self._tell(path, len(content), report)

    def _tell(self, path: Path, size: int, report: Silent) -> None:
        """Tell the time of the profiled steps in parts."""
        told = f"profiled steps {self.first} to {self.last}; megalite profile {self.folder.parents[1]} draws them"
        if size > MAX_TRACE_BYTES:
            report.event(self.last, "profiled", told, path=str(path))
            return
        trace = read_trace(path)
        found = breakdown(trace)
        parts = {name: time / 1e9 / trace.about.steps for name, time in found.parts.items()}
        table = table_text(parts_table(found, trace.about.steps, trace.about.expected))
        report.event(self.last, "profiled", f"{told}\n{table}", path=str(path), parts=parts, seconds=trace.step_seconds)

    def _expected(self) -> Expected | None:
        """The prediction for this run; None where no cluster is named or known, or nothing is predicted."""
        try:
            cluster = cluster_of_run(self.job.config, self.job.mesh.device)
            return None if cluster is None else Expected.of(self.job.config, cluster, self.job.plan)
        except InputError as error:
            warn(f"the profile has no prediction: {error}")
            return None

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever fails here, training goes on
            self._recording = None
            warn(f"steps {self.first} to {self.last} are not profiled: {str(error) or type(error).__name__}")


def compressed(recording: Recording) -> bytes:
    """The trace of a recording, compressed."""
    into = io.BytesIO()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recording.export(path)
        with (
            path.open("rb") as trace,
            gzip.GzipFile(fileobj=into, mode="wb", compresslevel=COMPRESSION, mtime=0) as file,
        ):
            shutil.copyfileobj(trace, file, 1 << 20)
    return into.getvalue()
