"""The options of both cross-entropies about classes and targets."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Labels(NamedTuple):
    """Classes of the columns of this rank's logits, and the options by which targets are read."""

    first: int  # class of the first column
    columns: int  # how many columns are classes; those after them are padding
    vocabulary: int  # classes on all ranks
    ignore_index: int | None
    smoothing: float
    z_loss: float
    softcap: float = 0.0  # 0: logits are not capped

    @property
    def constants(self) -> dict[str, float | bool]:
        return {
            "KEPT": 1 - self.smoothing,
            "SHARE": self.smoothing / self.vocabulary,
            "Z_LOSS": self.z_loss,
            "IGNORES": self.ignore_index is not None,
            "CAP": self.softcap,
        }

    def widened(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits in `dtype`, capped. A copy, unless they have that type and there is no cap."""
        wide = logits.to(dtype, copy=self.softcap > 0)
        return wide.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else wide

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The column of every target, and whether its class is on this rank. Padding has no classes."""
        local = targets - self.first
        return local.clamp(0, max(self.columns - 1, 0)), (local >= 0) & (local < self.columns)


def labels_of(
    rows: int,
    width: int,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    ignore_index: int | None,
    smoothing: float,
    z_loss: float,
    vocabulary: int | None,
    columns: range | None,
    softcap: float | None = None,
) -> Labels:
    """The checked options of `cross_entropy` for `rows` and their targets. Raises ValueError if they contradict."""
    if targets.shape != (rows,):
        raise ValueError(f"cross_entropy: targets {list(targets.shape)} must be [{rows}], one for each row of logits")
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    if vocabulary is None:
        vocabulary = ranks * width
    if columns is None:
        columns = range(min(rank * width, vocabulary), min((rank + 1) * width, vocabulary))
    if columns.step != 1 or len(columns) > width or columns.start < 0 or columns.stop > vocabulary:
        raise ValueError(
            f"cross_entropy: {columns} are not at most {width} neighbouring classes, the width of the logits, "
            f"among {vocabulary}; see `columns` and `vocabulary`"
        )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing is {smoothing}, but must be between 0 and 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"cross_entropy: z_loss is {z_loss}, but must be 0 or more")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"cross_entropy: softcap is {softcap}, but must be above 0, or None")
    return Labels(
        columns.start, len(columns), vocabulary, ignore_index, float(smoothing), float(z_loss), float(softcap or 0)
    )
