"""Checks whether tensors can be those of a run: all finite, and no negative squares. Healthy ones are read once."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.optim.file_pieces import buckets, in_memory
from megalite.optim.scratch_file import file_of

LISTED_NAMES = 3  # names in a message
SQUARES_PREFIX = "optimizer.exp_avg_sq."  # begins the name of what AdamW takes the root of


class PoisonedError(ValueError):
    """A tensor holds a NaN or an infinity, or a negative square."""


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that have a NaN or an infinity. Only this rank's part of a DTensor is looked at.

    A tensor's L2 norm takes as long as reading the tensor, and shows both. As it shows squares that overflow as well, a
    tensor that it points to is looked at again.
    """
    parts = {name: _part(tensor) for name, tensor in tensors.items()}
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    in_files: list[str] = []
    for name, part in parts.items():
        if file_of(part) is not None:
            in_files.append(name)
        elif part.numel() and part.is_floating_point():
            alike.setdefault((part.device, part.dtype), []).append(name)
    found = {name for name in in_files if not _finite_in_file(parts[name])}
    for names in alike.values():
        finite = torch.stack(torch._foreach_norm([parts[name] for name in names])).isfinite().tolist()
        suspects = (name for name, fine in zip(names, finite, strict=True) if not fine)
        found.update(name for name in suspects if not parts[name].isfinite().all())
    return [name for name in tensors if name in found]


def _finite_in_file(part: Tensor) -> bool:
    return all(bool(in_memory(part[rows]).isfinite().all()) for rows in buckets(part))


def refuse_poisoned(tensors: Mapping[str, Tensor]) -> None:
    """Raises PoisonedError with the names of tensors that are not finite here."""
    _refuse("NaN or infinity in", not_finite(tensors))


def refuse_negative_squares(tensors: Mapping[str, Tensor]) -> None:
    """Raises PoisonedError with the second moments that are negative here, of which the next step would make NaN."""
    squares = {name: _part(tensor) for name, tensor in tensors.items() if name.startswith(SQUARES_PREFIX)}
    _refuse("negative squares in", [name for name, part in squares.items() if (part < 0).any()])


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
        raise PoisonedError(f"{what} {', '.join(names[:LISTED_NAMES])}{more}")
