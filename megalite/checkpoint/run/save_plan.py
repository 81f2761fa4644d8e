"""The plan of a save: which rank writes which part of the state, by torch.distributed.checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from megalite.optim.file_pieces import buckets, in_memory
from megalite.parallel.parameter import box


@dataclass
class WriterPlan:
    """Assignment of tensors to writing ranks. It is made once, as a run's tensors keep their names and shapes."""

    planner: "Planner"
    mine: SavePlan
    metadata: Metadata | None  # on the first rank


class Planner(DefaultSavePlanner):
    """Plans with DTensors, those in files cut into buckets, and writes the tensors that are staged for them."""

    staged: Mapping[str, Tensor]
    rows: dict[MetadataIndex, slice]  # the rows of its staged tensor that an item holds

    def create_local_plan(self) -> SavePlan:
        plan, self.rows = super().create_local_plan(), {}
        return replace(plan, items=[each for item in plan.items for each in self._placed(item)])

    def lookup_object(self, index: MetadataIndex) -> Any:
        part = self.staged[index.fqn]
        rows = self.rows.get(index)
        return in_memory(part if rows is None else part[rows]).contiguous()  # the index tells of whole rows

    def _placed(self, item: WriteItem) -> Iterator[WriteItem]:
        """Give `item` the place of this rank's part of a DTensor, which DCP does not know if the DTensor is `cut`."""
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor):
            yield item
            return
        assert item.tensor_data is not None
        sizes, offsets = box(tensor)
        for rows in buckets(tensor.to_local()):
            first = torch.Size([offsets[0] + rows.start, *offsets[1:]])
            chunk = ChunkStorageMetadata(first, torch.Size([rows.stop - rows.start, *sizes[1:]]))
            index = MetadataIndex(item.index.fqn, first)
            self.rows[index] = rows
            yield replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def written_bytes(plan: SavePlan) -> int:
    """Bytes of the tensors that a rank writes."""
    found = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in found)


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of weights and moments. A save copies all of it, whichever rank writes it."""
    return {name: tensor.to_local() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
