"""Weights in files of any format, under our names. Imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError, File
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.manifest import Manifest
from megalite.checkpoint.store.progress import Training
from megalite.checkpoint.weights.maps.families import CONFIG
from megalite.checkpoint.weights.maps.folded import folded
from megalite.checkpoint.weights.maps.peft import Within
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.maps.upcycled import Upcycling
from megalite.checkpoint.weights.maps.woven import Woven
from megalite.config.model_schema import Adapter, Model
from megalite.plan.model.weights import weights

LISTED_NAMES = 5  # names in a message
COPY = "base."  # begins the name of a copy of a base's tensor that an adapter's files have too


@dataclass(frozen=True)
class Merging:
    """The factors of an adapter, whose products are added to the weights of a base."""

    factors: "Weights"
    adapter: Adapter


@dataclass(frozen=True)
class Weights:
    """The weights of a model, and where they lie.

    index: of the files in `path`, by our names. sizes: of the files, in bytes. source: the file that the index is from.
    links: whether files may be links. family: the Hugging Face family that the folder told of, if any. companions:
    other files that belong to the model, such as its tokenizer, to be taken along. tokenizer: that of a run, where
    there are no companions. end: the id that ended its documents, if it was configured. hashes: of the files, if known.
    trained: whether the files hold states of an optimizer too. training: the run that saved these, where the index has
    them. manifest: of megalite's checkpoint. factors: what tensors are multiplied by when they are read, by our names.
    upcycling or merging, dense: how experts are made, or which adapter is added, and the weights that they are made of
    or that it is added to; the index then has no places of its own.
    woven: places of tensors that have no chunks in the index. shared: tensors that lie where others do, and those.
    norms: how often norms of rows are added to what adapters train beside these, and the weights that have the rows.
    """

    kind: str
    path: Path
    model: Model
    index: Index
    sizes: Mapping[str, int]
    source: str
    links: bool = True
    family: str | None = None
    companions: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    tokenizer_name: str | None = None  # as the run was given it
    end: int | None = None
    trained: bool = False
    training: Training | None = None
    manifest: Manifest | None = None
    hashes: Mapping[str, File] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    upcycling: Upcycling | None = None
    merging: Merging | None = None
    dense: "Weights | None" = None
    woven: Mapping[str, Woven | Within] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    norms: "tuple[int, Weights] | None" = None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the index."""
        return sum(tensor.bytes for tensor in self.index.tensors.values())

    def without_states(self) -> "Weights":
        """Return these weights without an optimizer's states."""
        kept = {name: tensor for name, tensor in self.index.tensors.items() if name.startswith(PREFIX)}
        return replace(self, index=Index(self.index.files, kept), training=None)

    def without_mtp(self) -> "Weights":
        """Return these weights without layers of multi-token prediction."""
        if self.model.mtp is None:
            return self
        model = replace(self.model, mtp=None)
        kept = {name: self.index.tensors[name] for name in (PREFIX + each for each in weights(model))}
        files = tuple(file for file in self.companions if file.name != CONFIG)  # which tells of these layers
        return replace(self, model=model, index=Index(self.index.files, kept), companions=files, training=None)

    def folded(self) -> "Weights":
        """Return the same function as a model without multipliers, which other programs know; see `maps.folded`.

        Raises InputError if there are states of an optimizer, which belong to the weights as they are.
        """
        plain, factors = folded(self.model)
        if factors and self.training is not None:
            rule = "has factors that other programs lack; they go into the weights, which the optimizer's states then"
            name = self.model.parametrization
            raise InputError(
                f"{self.path}: model.parametrization = {name}: {rule} do not belong to; leave --optimizer out"
            )
        return replace(self, model=plain, factors={PREFIX + name: factor for name, factor in factors.items()})

    @property
    def dtype(self) -> str:
        """The data type of most of the elements of weights."""
        elements: dict[str, int] = {}
        for name, tensor in self.index.tensors.items():
            if not name.startswith(PREFIX):
                continue
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.elements
        return max(elements, key=lambda dtype: elements[dtype])


def refuse_differences(path: Path, file: str, found: Collection[str], wanted: Collection[str]) -> None:
    """Raises DamagedError where tensors are missing, or are there that the model does not have."""
    names = set(found), set(wanted)
    for odd, what in ((names[1] - names[0], "lacks"), (names[0] - names[1], "has what its model has not:")):
        if odd:
            more = f" and {len(odd) - LISTED_NAMES} more" if len(odd) > LISTED_NAMES else ""
            raise DamagedError(path, f"{file} {what} {', '.join(sorted(odd)[:LISTED_NAMES])}{more}")
