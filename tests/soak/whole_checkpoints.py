"""Checkpoints as another program sees them: told by their names, held against their manifests, read by plain DCP."""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from violation import Violation

MANIFEST = "manifest.json"
SEEN = "seen-by-the-kill-test"  # a file that tells folders left behind by one kill from those of the next


def complete(folder: Path) -> dict[int, Path]:
    """What carries the name of a checkpoint, by step, ascending."""
    names = {path.name.removeprefix("step-"): path for path in folder.glob("step-*") if "." not in path.name}
    return {int(step): path for step, path in sorted(names.items())}


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max(complete(folder), default=0)


def check_complete(path: Path) -> None:
    """Raise Violation unless the checkpoint `path` is what its manifest says, to the byte, and nothing else."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise Violation(f"{path}: has no manifest: {error}") from error
    files = {MANIFEST, *manifest["files"]}
    if f"step-{manifest['step']:08d}" != path.name or (there := {file.name for file in path.iterdir()}) != files:
        raise Violation(f"{path}: holds step {manifest['step']} and {sorted(there)}, not {sorted(files)}")
    for name, file in manifest["files"].items():
        data = (path / name).read_bytes()
        if len(data) != file["bytes"] or xxhash.xxh128(data).hexdigest() != file.get("xxh128"):
            raise Violation(f"{path / name}: {len(data)} bytes that are not those of the manifest")


def left_behind(folder: Path, suffix: str, holding: str = "") -> list[Path]:
    """Half-done checkpoints of the latest attempt; with `holding`, those with this file in them."""
    found = [path for path in folder.glob(f"step-*{suffix}*") if not (path / SEEN).exists()]
    return [path for path in found if (path / holding).exists()]


def note_left_behind(folder: Path, suffix: str) -> int:
    """How many there are; they will not be counted again."""
    found = left_behind(folder, suffix)
    for path in found:
        (path / SEEN).touch()
    return len(found)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process without a process group is what is meant
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest magnitude in each tensor. Whole numbers must be equal. Raises Violation."""
    if found.keys() != expected.keys():
        raise Violation(f"tensors {sorted(found.keys() ^ expected.keys())} are in one of the two checkpoints only")
    largest = 0.0
    for name, tensor in found.items():
        other = expected[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise Violation(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {other.dtype} {list(other.shape)}")
        if torch.equal(tensor, other):
            continue
        if not tensor.is_floating_point():
            raise Violation(f"{name}: {tensor.tolist()}, not {other.tolist()}")
        difference = ((tensor - other).abs().max() / other.abs().max()).item()
        largest = max(largest, difference)
        if not difference < float("inf"):
            raise Violation(f"{name}: not finite")
    return largest
