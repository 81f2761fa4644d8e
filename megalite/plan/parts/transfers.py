"""The vocabulary of predicted and counted communication: one transfer, and the axes over which ranks send."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.schema import Config

# The data type of an activation or a weight, by its bytes; 1: of weights that are gathered as bytes.
TYPE_NAMES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}


class Transfer(NamedTuple):
    """One collective, or one message between two ranks, as the rank that takes part in it sees it.

    bytes: of the whole tensor. For an all_gather, that is the result; for a reduce_scatter, what is reduced; for an
    all_reduce, a broadcast, a send and a receive, the tensor itself. For an all_to_all, it is all
    that the rank puts in or all that it gets, whichever is more, its own part included. So in a group of n ranks a
    ring moves (n - 1)/n of the bytes over every link, and for an all_reduce twice as many.
    """

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send or receive
    axis: str  # see `axis_sizes`
    bytes: int
    dtype: str


Purposed = tuple[Transfer, str]  # with the reason for the transfer
Transfers = Counter[Purposed]  # how often


@dataclass(frozen=True)
class Traffic:
    """A transfer in which a rank takes part `times` times in a training step; see `Transfer` for the other fields."""

    kind: str
    axis: str
    ranks: int  # size of the group; for pp all ranks of the pipeline, though two of them exchange a message
    bytes: int
    dtype: str
    times: int
    purpose: str  # phase: what for

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.kind, self.axis, self.bytes, self.dtype)

    @property
    def total(self) -> int:
        """Bytes of all times."""
        return self.bytes * self.times


def over(axis: str, kind: str, size: int, each: int, purpose: str, times: int = 1) -> Transfers:
    """`times` transfers of `size` bytes, `each` an element; none where there is nothing to send."""
    return Counter({(Transfer(kind, axis, size, TYPE_NAMES[each]), purpose): times} if size and times else {})


def axis_sizes(config: Config) -> dict[str, int]:
    """The number of ranks in a group along each axis, as `dist.mesh` makes the groups.

    tp, cp, pp         as in the layout
    fsdp               ranks over which parameters are sharded: dp_shard · cp, or 1 with mode ddp
    dp_replicate       ranks that hold the same shards
    ep                 ranks that share out the experts of a layer
    ep_fsdp            ranks with the same experts over which these are sharded, dp_shard · cp · tp / ep, or 1 with ddp
    ep_replicate       ranks that hold the same shards of experts
    world              all ranks
    stage              all ranks of a pipeline rank; a group of their own only where no other axis has the same ranks
    """
    layout = config.parallel.layout
    inner = layout.dp * layout.cp
    shards = layout.dp_shard * layout.cp if config.parallel.data.sharded else 1
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "fsdp": shards,
        "dp_replicate": inner // shards,
        "pp": layout.pp,
        "ep": config.parallel.ep,
        "ep_fsdp": config.parallel.expert_shards,
        "ep_replicate": inner * layout.tp // layout.ep // config.parallel.expert_shards,
        "world": layout.world_size,
        "stage": layout.world_size // layout.pp,
    }


def stage_axis(config: Config) -> str:
    """The axis of the group that has all ranks of a pipeline rank: `dist.mesh` makes no second group of equal ranks."""
    if config.parallel.pp == 1:
        return "world"
    sizes = axis_sizes(config)
    used = [axis for axis in ("dp_replicate", "fsdp", "tp") if sizes[axis] > 1]
    return used[0] if len(used) == 1 else "stage"
