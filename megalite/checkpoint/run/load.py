"""Loading: every rank reads its part of a checkpoint of any layout; together they check every file's hash."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megalite.base.errors import InputError
from megalite.checkpoint.local.rescue import Rescue
from megalite.checkpoint.local.tier import Tier
from megalite.checkpoint.run.same_run import refuse_other_factors, refuse_other_run, refuse_other_weights
from megalite.checkpoint.store.disk import DamagedError, check_hashes, damage_of, share_of
from megalite.checkpoint.store.finite import refuse_negative_squares, refuse_poisoned
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, Manifest, Source, check_sizes, complete, step_of
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.retain import check_own, refuse_only_damaged, set_aside
from megalite.checkpoint.store.state import FilledPart, State, empty_progress, progress_from
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.merged import BASE
from megalite.checkpoint.weights.missing_tensors import FLOATS, differences
from megalite.checkpoint.weights.read import check_base, reader_of, refuse_other_base
from megalite.checkpoint.weights.reader import Reader, part_of
from megalite.checkpoint.weights.sources import newest, open_weights, resolved
from megalite.config.schema import Config
from megalite.model.fingerprint import MODULUS
from megalite.optim.file_pieces import buckets, filled
from megalite.optim.scratch_file import file_of
from megalite.optim.states import local
from megalite.parallel.fsdp import parameter_dtype
from megalite.parallel.hashes import signed

Say = Callable[[str], None]
T = TypeVar("T")


class Restorer:
    """Fills `state` from checkpoints. Its methods are collective.

    data: the sources that the run reads. advanced: called as reading proceeds. check_owner: called on the first rank
    before a checkpoint is set aside; does not return if the folder has become another job's. tier: has the run's local
    checkpoints.
    """

    def __init__(
        self,
        state: State,
        config: Config,
        data: tuple[Source, ...],
        group: HostGroup,
        advanced: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
        tier: Tier | None = None,
    ) -> None:
        self.state, self.config, self.data = state, config, data
        self._group, self._advanced, self._check_owner, self._tier = group, advanced, check_owner, tier
        self.base: int | None = None  # with adapters: the number of the base that is loaded, as an int64

    def newest(self, folder: Path, warn: Say, before: int | None = None) -> Progress | None:
        """Continue from the newest intact checkpoint in `folder`. Returns its progress, or None if there never was one.

        One that is newer, and whole on the nodes of the job together, is copied to `folder` first. Damaged checkpoints
        are set aside; `warn` is told of them on the first rank. Raises InputError if only damaged ones are left, and
        for a checkpoint of another model or other data.

        before: continue from one of an earlier step than this. The others are set aside, unless there is no such
        checkpoint: then they stay, and None is returned.
        """
        passed_over: set[Path] = set()  # known on the first rank
        rescue = Rescue(self._tier, warn) if self._tier is not None else None

        def pass_over(error: DamagedError) -> None:
            self._check_owner()
            _pass_over(error, passed_over, warn)

        def pass_over_later() -> None:
            for path in complete(folder):
                if before is not None and step_of(path) >= before:
                    pass_over(DamagedError(path, "training that continued from it failed again"))

        def next_path() -> Path | None:
            if rescue is not None:
                rescue.newest(before)
            return self._group.once(lambda: _newest(folder, passed_over, pass_over, before))

        progress = None
        while progress is None and (path := next_path()):
            try:
                progress = self.all(path)
            except DamagedError as error:  # the same on all ranks
                self._group.once(partial(pass_over, error))
            else:
                self._group.once(pass_over_later)
        if self._tier is not None:
            self._tier.begin()
        return progress

    def all(self, path: Path) -> Progress:
        """Continue from the checkpoint `path`. Raises DamagedError, and InputError if it is of another run."""
        manifest = self._group.once(lambda: check_sizes(path))
        self._group.everywhere(lambda: refuse_other_run(path, manifest, self.config, self.data))
        if self.state.adapted and self.base is None:
            assert self.config.checkpoint.weights is not None, "`check_start` has refused an adapter without a base"
            self.weights(self.config.checkpoint.weights)
        tensors = self.state.tensors()
        self._fill(path, manifest, lambda: self._read(path, manifest, tensors))
        if self.base is not None:
            source = str(self.config.checkpoint.weights)
            refuse_other_base(int(tensors[BASE]), self.base, str(path), f"checkpoint.weights = {source}")
        progress = checked_progress(path, manifest, tensors)
        self.state.loaded(progress.updates)
        return progress

    def weights(self, source: str, base: str | None = None) -> None:
        """Load only the weights, from `KIND:PATH`; with adapters, those of their base.

        base: weights to which those of an adapter at `source` are added; None: those that it names.

        Raises DamagedError, and InputError if they are of another model.
        """
        kind, path = self._group.once(lambda: resolved(source))
        path = self._group.once(partial(newest, path)) if kind == "megalite" else path
        manifest = self._group.once(lambda: check_sizes(path)) if kind == "megalite" else None
        if manifest is not None and manifest.configuration.adapter is None:
            refuse_other_weights(path, manifest.configuration.model, self.config)
            numbers = self._fill(path, manifest, lambda: self._fill_base(Reader.of_checkpoint(path, manifest)))
        else:
            found = self._group.once(lambda: opened(f"{kind}:{path}", base))
            refuse_other_weights(path, found.model, self.config)
            numbers = self._group.everywhere(lambda: self._fill_base(reader_of(found)))
        self.state.loaded_weights()
        if self.state.adapted:
            parts = self._group.share(numbers)
            apart = dict(chain.from_iterable(part.items() for part in parts)) | {"": sum(part[""] for part in parts)}
            self.base = signed(sum(apart.values()) % MODULUS)

    def factors(self, source: str) -> None:
        """Load only an adapter's factors, from `KIND:PATH`. Raises DamagedError, and InputError for another adapter."""
        found = self._group.once(lambda: opened(source, self.config.checkpoint.weights))
        self._group.once(lambda: refuse_other_factors(source, found, self.config))
        assert found.merging is not None
        factors = found.merging.factors
        self._group.everywhere(lambda: _fill_factors(factors, self.state.held()))

    def _fill(self, path: Path, manifest: Manifest, read: Callable[[], T]) -> T:
        """Run `read`, which reads the checkpoint `path`, while its files are hashed; return what it returns."""
        mine = share_of(manifest.files, self._group.rank, self._group.ranks)
        with ThreadPoolExecutor(1, "hash") as beside:
            hashing = beside.submit(check_hashes, path, mine if self.config.checkpoint.verify else {}, self._hashed)
            problem: InputError | None = None
            try:
                found = self._group.everywhere(read)
            except InputError as error:
                problem = error
            self._group.everywhere(hashing.result)  # damage explains why reading failed, so it comes first
            if problem is not None:
                raise problem
        return found

    def _read(self, path: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        """Read into `tensors`, to which those of the progress are added."""
        reader = Reader.of_checkpoint(path, manifest)
        own = str(parameter_dtype(manifest.configuration.train.dtype)).removeprefix("torch.")
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if differ := differences(reader.index, shapes, {own}):
            raise DamagedError(path, f"{INDEX} does not have the tensors of its model: {differ}")
        with damage_of(path, INDEX):
            tensors |= empty_progress(reader.index, more=(BASE,) if self.state.adapted else ())
        in_files = {name for name, tensor in tensors.items() if file_of(local(tensor)) is not None}
        in_memory = {name: tensor for name, tensor in tensors.items() if name not in in_files}
        reader.fill(in_memory)
        _refuse_impossible(path, in_memory)
        reader.check(in_files)
        for name in sorted(in_files):
            _fill_in_file(reader, name, tensors[name])

    def _fill_base(self, reader: Reader) -> dict[str, int]:
        """Fill this rank's part of the base, and return its numbers. Raises DamagedError."""
        shapes = self.state.base()
        _refuse_others(reader, shapes)
        reader.check(shapes)

        def fill(parts: Sequence[FilledPart]) -> None:
            reader.fill_parts(parts)
            _refuse_poisoned(reader.path, {name: part for name, part, _ in parts})

        return self.state.fill_base(fill)

    def _hashed(self, _: int) -> None:
        self._advanced()


def opened(source: str, base: str | None) -> Weights:
    """The weights at `source`. base: weights to which those of an adapter are added, if not those that it names.

    Raises InputError, for an adapter that was trained beside another base too.
    """
    found = open_weights(source, base=base)
    check_base(found)
    return found


def _fill_in_file(reader: Reader, name: str, tensor: Tensor) -> None:
    """Fill this rank's part of a state that is in a file. Raises DamagedError, and Unhealthy when its drive fails."""
    part, (first, *others) = part_of(tensor)
    for rows in buckets(part):
        with filled(part[rows]) as values:
            reader.fill_parts([(name, values, (first + rows.start, *others))])
            _refuse_impossible(reader.path, {name: values})


def _refuse_impossible(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises DamagedError for values that no run can have come to."""
    try:
        refuse_poisoned(tensors)
        refuse_negative_squares(tensors)
    except ValueError as error:
        raise DamagedError(path, str(error)) from None


def _fill_factors(found: Weights, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's part of an adapter's factors. Raises DamagedError."""
    reader = reader_of(found)
    _refuse_others(reader, {name: tensor.shape for name, tensor in tensors.items()})
    reader.fill(tensors)
    _refuse_poisoned(found.path, tensors)


def _refuse_others(reader: Reader, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises DamagedError unless files have tensors of these shapes."""
    if differ := differences(reader.index, shapes, FLOATS):
        raise DamagedError(reader.path, f"{reader.source} does not have the tensors of its model: {differ}")


def _refuse_poisoned(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises DamagedError if a tensor that was read in `path` is not finite."""
    try:
        refuse_poisoned(tensors)
    except ValueError as error:
        raise DamagedError(path, str(error)) from None


def _newest(
    folder: Path, passed_over: set[Path], pass_over: Callable[[DamagedError], None], before: int | None
) -> Path | None:
    """The newest checkpoint in `folder` of a step below `before` all of whose files are there. Sets others aside."""
    for path in reversed(complete(folder)):
        if path in passed_over or (before is not None and step_of(path) >= before):
            continue
        try:
            check_own(path)
        except DamagedError as error:
            pass_over(error)
        else:
            return path
    if before is None:
        refuse_only_damaged(folder, passed_over)
    return None


def _pass_over(error: DamagedError, passed_over: set[Path], warn: Say) -> None:
    """Set a damaged checkpoint aside, or remember it if its name cannot be changed."""
    try:
        done = f"it is set aside as {set_aside(error.path).name}"
    except OSError as refused:
        done = f"it cannot be set aside ({refused.strerror})"
        passed_over.add(error.path)
    warn(f"{error}; {done}, and the one before is used")


def checked_progress(path: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> Progress:
    """The progress in `tensors`, as read of a checkpoint. Raises DamagedError if its step is not the manifest's."""
    with damage_of(path, INDEX):
        progress = progress_from(tensors)
        if (progress.step, progress.tokens) != (manifest.step, manifest.tokens):
            raise ValueError(f"is of step {progress.step}, {progress.tokens} tokens; {MANIFEST} is of another")
    return progress
