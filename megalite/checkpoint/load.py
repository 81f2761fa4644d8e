"""Loading: every rank reads its part of a checkpoint of any layout, while all together check every file's hash."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megalite.checkpoint.compare import refuse_other_data, refuse_other_model
from megalite.checkpoint.files import Reader
from megalite.checkpoint.manifest import DamagedError, Manifest, Source, check_hashes, check_sizes, complete, share_of
from megalite.checkpoint.progress import Progress
from megalite.checkpoint.retain import damaged, set_aside
from megalite.checkpoint.state import State, empty_progress, progress_from
from megalite.checkpoint.together import Together
from megalite.config.errors import InputError
from megalite.config.schema import Config

Say = Callable[[str], None]
SHOWN = 5  # names of differing tensors


class Restorer:
    """Fills `state` from checkpoints. Its methods are collective.

    data: the sources that the run reads. advanced: called as reading proceeds. check_owner: called on the first rank
    before a checkpoint is set aside; does not return where the folder has become another job's.
    """

    def __init__(
        self,
        state: State,
        config: Config,
        data: tuple[Source, ...],
        together: Together,
        advanced: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self.config, self.data = state, config, data
        self._together, self._advanced, self._check_owner = together, advanced, check_owner

    def newest(self, folder: Path, warn: Say) -> Progress | None:
        """Continue from the newest checkpoint in `folder` that is intact; None: there never was one.

        `warn` hears, on the first rank, of damaged ones, which are set aside. Raises InputError where only such are
        left, and for a checkpoint of another model or other data.
        """

        def set_aside(error: DamagedError) -> None:
            self._check_owner()
            _set_aside(error, warn)

        while path := self._together.once(lambda: _newest(folder, set_aside)):
            try:
                return self.all(path)
            except DamagedError as error:  # the same on all ranks
                self._together.once(partial(set_aside, error))
        return None

    def all(self, path: Path) -> Progress:
        """Continue from the checkpoint `path`. Raises DamagedError, and InputError if it is of another run."""
        manifest = self._together.once(lambda: check_sizes(path))
        refuse_other_model(path, manifest.configuration, self.config)
        self._together.everywhere(lambda: refuse_other_data(path, manifest, self.config, self.data))
        tensors = self.state.tensors()
        self._fill(path, manifest, tensors, progress=True)
        progress = progress_from(tensors)
        self.state.loaded(progress.updates)
        return progress

    def weights(self, path: Path) -> None:
        """Take the weights alone. Raises DamagedError, and InputError if they are of another model."""
        manifest = self._together.once(lambda: check_sizes(path))
        refuse_other_model(path, manifest.configuration, self.config)
        self._fill(path, manifest, self.state.weights(), progress=False)
        self.state.loaded_weights()

    def _fill(self, path: Path, manifest: Manifest, tensors: dict[str, Tensor], progress: bool) -> None:
        """Read into `tensors`; with `progress`, into tensors for it too, which are added."""
        mine = share_of(manifest.files, self._together.rank, self._together.ranks)
        with ThreadPoolExecutor(1, "hash") as beside:
            hashing = beside.submit(check_hashes, path, mine if self.config.checkpoint.verify else {}, self._hashed)
            problem: InputError | None = None
            try:
                self._together.everywhere(lambda: self._read(path, tensors, progress))
            except InputError as error:
                problem = error
            self._together.everywhere(hashing.result)  # damage explains why reading failed, so it comes first
            if problem is not None:
                raise problem

    def _read(self, path: Path, tensors: dict[str, Tensor], progress: bool) -> None:
        try:
            metadata = Reader(path).read_metadata()
            if progress:
                tensors |= empty_progress(metadata)
            _refuse_other_tensors(path, metadata, tensors)
            read_parts(path, metadata, tensors)
        except InputError:
            raise
        except Exception as error:  # what torch makes of a damaged file can be anything
            raise InputError(f"{path}: cannot be read: rank {self._together.rank}: {error!r}") from error

    def _hashed(self, _: int) -> None:
        self._advanced()


def read_parts(path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, of a DTensor this rank's part, without asking other ranks: DCP's index tells where they are."""
    reader, planner = Reader(path), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def _newest(folder: Path, set_aside: Callable[[DamagedError], None]) -> Path | None:
    """The newest checkpoint in `folder` whose files are there in full; others are set aside."""
    for path in reversed(complete(folder)):
        try:
            check_sizes(path)
        except DamagedError as error:
            set_aside(error)
        else:
            return path
    if aside := damaged(folder):
        raise InputError(
            f"{folder} holds no intact checkpoint, but {aside[-1].name}, which is damaged; "
            "train from the beginning with checkpoint.resume=never, or give run.name another name"
        )
    return None


def _set_aside(error: DamagedError, warn: Say) -> None:
    aside = set_aside(error.path)
    warn(f"{error}; it is set aside as {aside.name}, and the one before is used")


def _refuse_other_tensors(path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Raises InputError with the names of tensors that the checkpoint lacks, or has in another shape."""
    there = {
        name: entry.size
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    differ = [name for name, tensor in tensors.items() if there.get(name) != tensor.shape]
    if differ:
        listed = ", ".join(
            f"{name} {_shape(there.get(name))} instead of {_shape(tensors[name].shape)}" for name in differ[:SHOWN]
        )
        more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise InputError(f"{path}: is a checkpoint of another model: {listed}{more}")


def _shape(size: torch.Size | None) -> str:
    return "missing" if size is None else str(list(size))
