"""Plans of folders of any kind, for weights of any kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megalite.base.errors import InputError, listing
from megalite.checkpoint.weights.formats import dcp, huggingface, megatron, meta, peft, torch_dist
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.output import OutputPlan
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.checkpoint.weights.maps.models import is_correction
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.sources import STATE_REFUSALS, STATEFUL_KINDS


@dataclass(frozen=True)
class Wanted:
    """Form in which weights are to be written. None and 1 stand for the kind's default.

    dtype: of all tensors but corrections of routers, a name in torch; None: each keeps its own. shard: bytes of a
    safetensors file at most. files: into which a checkpoint of megalite is divided. tp, pp, virtual: ranks and virtual
    stages of Megatron; tp also files of Meta.
    """

    dtype: str | None = None
    shard: int | None = None
    files: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1

    @property
    def split(self) -> Split:
        return Split(self.tp, self.pp, self.virtual)


def plan_of(kind: str, found: Weights, target: Path, wanted: Wanted) -> OutputPlan:
    """The plan of a folder of `kind`. Raises InputError for what the kind cannot express or has no use for."""
    used = USED_OPTIONS[kind]
    for name, default in (("shard", None), ("tp", 1), ("pp", 1), ("virtual", 1)):
        if name not in used and getattr(wanted, name) != default:
            kinds = listing([kind for kind, uses in USED_OPTIONS.items() if name in uses])
            raise InputError(f"--{OPTIONS[name]} {getattr(wanted, name)}: has no meaning for {kind}, only for {kinds}")
    if found.training is not None and kind not in STATEFUL_KINDS:
        raise InputError(f"--to {kind}:{target}: {STATE_REFUSALS[kind]}; leave --optimizer out")
    tensors = {name: tensor for name, tensor in found.index.tensors.items() if name.startswith(PREFIX)}
    kinds_of_data = sorted({tensor.dtype for name, tensor in tensors.items() if not is_correction(name)})
    if wanted.dtype is None and kind in SINGLE_DTYPE_KINDS and len(kinds_of_data) > 1:
        there = listing(kinds_of_data, "and")
        raise InputError(f"{found.path}: has tensors of {there}, but {kind} has one data type; choose it with --dtype")
    return PLANS[kind](found, target, wanted)


SINGLE_DTYPE_KINDS = ("megatron", "megatron-dist", "meta")  # all tensors are of one data type, but corrections


OPTIONS = {"shard": "shard-size", "tp": "tp", "pp": "pp", "virtual": "virtual-stages"}
USED_OPTIONS: Mapping[str, set[str]] = {
    "megalite": set(),
    "hf": {"shard"},
    "megatron": {"tp", "pp", "virtual"},
    "megatron-dist": {"tp", "pp", "virtual"},
    "meta": {"tp"},
    "peft": set(),
}
PLANS: Mapping[str, Callable[[Weights, Path, Wanted], OutputPlan]] = {
    "megalite": lambda found, target, wanted: dcp.plan(found, target, wanted.dtype, wanted.files),
    "hf": lambda found, target, wanted: huggingface.plan(found, wanted.dtype, wanted.shard),
    "megatron": lambda found, target, wanted: megatron.plan(found, wanted.split, wanted.dtype),
    "megatron-dist": lambda found, target, wanted: torch_dist.plan(found, wanted.split, wanted.dtype),
    "peft": lambda found, target, wanted: peft.plan(found, wanted.dtype),
    "meta": lambda found, target, wanted: meta.plan(found, wanted.tp, wanted.dtype),
}
