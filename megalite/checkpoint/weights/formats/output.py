"""Output of a format: files, each written from its beginning to its end, whose tensors are fetched strip by strip."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint.store.disk import File
from megalite.checkpoint.weights.maps.strips import Theirs

Note = Any  # JSON


class Stream(Protocol):
    """A file that is being written. There is no way back."""

    def write(self, piece: Any) -> int: ...

    def tell(self) -> int: ...

    def flush(self) -> None: ...


Put = Callable[[Stream, Theirs, str], None]  # writes all elements of a tensor of theirs, in a data type


@dataclass(frozen=True)
class Output:
    """A file to be written.

    name: in the target folder, with `/` between folders. bytes: of its tensors, which progress is counted in.
    write: writes the file; what it returns is kept with the file's hash, for `OutputPlan.finish`.
    """

    name: str
    bytes: int
    write: Callable[[Stream, Put], Note]


@dataclass(frozen=True)
class Written:
    """A file that is whole, what its writer returned, and the names of tensors in it that are not finite."""

    file: File
    note: Note = None
    poisoned: tuple[str, ...] = ()
    earlier: bool = False  # by an attempt before this one


@dataclass(frozen=True)
class OutputPlan:
    """All that a target folder will hold.

    outputs: large files. texts: small files by name. copies: files to be copied, by name. finish: makes further small
    files when the large ones are written, from what is known of all others.
    """

    outputs: tuple[Output, ...]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    finish: Callable[[Mapping[str, Written]], Mapping[str, bytes]] = lambda written: {}
