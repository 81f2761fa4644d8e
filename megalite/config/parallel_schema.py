"""The keys of parallelism: types, defaults and what they mean, as in `schema`."""

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.layout import Layout


@dataclass
class Pipeline:
    schedule: str = "1f1b"  # a name of SCHEDULES, or the path of a schedule file
    virtual_stages: int | None = None  # stages per rank; null: as many as the schedule has
    memory: float | None = None  # auto: GiB of activations that a rank may hold; null: as many as 1f1b holds
    split: list[int] | None = None  # layers per stage; null: balanced by cost, embedding and head included
    overlap: bool = True  # dualpipev with parallel.ep: a forward and a backward take turns at computing

    @property
    def stages_per_rank(self) -> int:
        """The number of virtual stages per rank: as configured, or else the schedule's own."""
        return self.virtual_stages or SCHEDULES.get(self.schedule, 1)

    @property
    def searched(self) -> bool:
        """Flag: the order of the schedule is searched for."""
        return self.schedule == "auto"


SCHEDULES = {  # name -> stages per rank
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "zbv": 2,
    "dualpipev": 2,
    "auto": 1,  # or 2, placed in a V
}


@dataclass
class Context:
    method: Literal["ring", "ulysses", "all_gather"] = "ring"  # how attention reaches the other parts of a sequence


DataMode = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass
class DataParallel:
    """Data parallelism. A rank holds whole: ddp everything, zero1 weights and gradients, zero2 weights, zero3 nothing.

    Under zero1 and ddp gradients are reduced once a step, else after every micro-batch. auto: the first of zero1, zero2
    and zero3 that is predicted to fit the GPU; without one, zero1 on one rank and zero3 on several.
    """

    mode: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    reduce_precision: Literal["fp32", "bf16"] = "fp32"  # gradients on the network, where train.precision is bf16

    @property
    def sharded(self) -> bool:
        """Flag: parameters are divided among data-parallel ranks."""
        return self.mode != "ddp"


Buffers = Literal["exact", "worst_case"]
Overlap = Literal["pieces", "symmetric", "auto"]


@dataclass
class TensorParallel:
    # Gathers and scatters beside matrix products: in pieces; symmetric: fused with them, through memory of each other
    # that GPUs of a node can read; auto: symmetric where they can.
    overlap: Overlap = "pieces"


@dataclass
class ExpertParallel:
    # Rows of tokens at their experts: as many as come, for whose number the host waits in every layer; worst_case: room
    # for as many as can come, and no wait.
    buffers: Buffers = "exact"


@dataclass
class Placement:
    # Home of parameters: host: they are copied to the device ahead of use, and reduced gradients to the host; beside an
    # adapter, only weights that are not trained.
    parameters: Literal["device", "host"] = "device"


@dataclass
class Parallel:
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int | Literal["auto"] = "auto"  # auto: what the world size leaves; 1 without a launcher
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks of dp_shard · cp · tp over which the experts of a layer are divided, a multiple of tp
    pipeline: Pipeline = field(default_factory=Pipeline)
    context: Context = field(default_factory=Context)
    data: DataParallel = field(default_factory=DataParallel)
    experts: ExpertParallel = field(default_factory=ExpertParallel)
    placement: Placement = field(default_factory=Placement)
    tensor: TensorParallel = field(default_factory=TensorParallel)

    @property
    def fixed_buffers(self) -> bool:
        """Flag: ranks that share out experts have room for all rows that can come."""
        return self.ep > 1 and self.experts.buffers == "worst_case"

    @property
    def chunks(self) -> int:
        """Pieces of a sequence that a context-parallel rank has: zigzag gives it two."""
        return 2 if self.cp > 1 and self.context.method != "ulysses" else 1

    @property
    def sequence_parts(self) -> int:
        """Equal parts that a sequence must come in: chunks of context-parallel ranks, split over tp."""
        return self.chunks * self.cp * self.tp

    @property
    def data_mode(self) -> DataMode:
        """The mode of data parallelism. Where no memory decides what `auto` is: the first of `data_modes` on one rank,
        else zero3."""
        if self.data.mode != "auto":
            return self.data.mode
        return self.data_modes[0] if self.layout.dp * self.layout.cp == 1 else "zero3"

    @property
    def data_modes(self) -> tuple[DataMode, ...]:
        """The modes that `auto` tries one after another. Each sends at least as much as the one before."""
        alone = self.layout.dp * self.layout.cp == 1
        return ("zero3",) if alone and self.placement.parameters == "host" else ("zero1", "zero2", "zero3")

    @property
    def expert_shards(self) -> int:
        """Ranks with the same experts over which their parameters are sharded, once `dp_shard` is a number."""
        return self.layout.dp_shard * self.cp * self.tp // self.ep if self.data.sharded else 1

    @property
    def layout(self) -> Layout:
        """The layout, once `dp_shard` is a number."""
        if not isinstance(self.dp_shard, int):
            raise ValueError("parallel.dp_shard is still 'auto'; resolve the world size first")
        return Layout(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep)
