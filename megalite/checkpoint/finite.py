"""Whether tensors are finite: one pass over them where they are."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SHOWN = 3  # names in a message


class PoisonedError(ValueError):
    """A tensor holds a NaN or an infinity."""


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a NaN or an infinity; of a DTensor, this rank's part is looked at.

    A tensor's L2 norm takes as long as reading it, and tells of both. It tells of squares that overflow as well, so
    what it points to is looked at again.
    """
    parts = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, part in parts.items():
        if part.numel() and part.is_floating_point():
            alike.setdefault((part.device, part.dtype), []).append(name)
    found: set[str] = set()
    for names in alike.values():
        finite = torch.stack(torch._foreach_norm([parts[name] for name in names])).isfinite().tolist()
        suspects = (name for name, fine in zip(names, finite, strict=True) if not fine)
        found.update(name for name in suspects if not parts[name].isfinite().all())
    return [name for name in tensors if name in found]


def refuse_poisoned(tensors: Mapping[str, Tensor]) -> None:
    """Raises PoisonedError with the names of tensors that are not finite here."""
    if names := not_finite(tensors):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise PoisonedError(f"NaN or infinity in {', '.join(names[:SHOWN])}{more}")
