"""Bytes that one pipeline rank holds at the peak of a training step, by what they are.

Walks the rank's program of the very table that the runner executes: the parts of its stages (`plan.activations`)
keep activations from forward to backward, gradients accumulate or are reduced, weights are gathered and freed.

    P  parameters of the rank's stages before data-parallel sharding, N those of one part
    D  ranks that share out parameters: dp_shard · cp, or 1 with mode ddp
    w  bytes of a compute weight    p  bytes of a sharded parameter    r  bytes of a gradient on the network

    parameters          pP/D
    optimizer states    2pP/D
    gathered weights    wP through the step (ddp, zero1, zero2), or wN of the part in use (zero3); 0 where a single
                        data-parallel rank computes in the precision of its parameters
    gradients           pP/D once they are reduced, which is after every micro-batch (zero2, zero3) or the last one
                        (ddp, zero1); until then rP. Of the newest part to be reduced another rN, until the next is
    activations         see plan.activations
    temporaries         of backward; wN of gradients being made; wN to gather the next part (zero3); activations
                        made again or brought back
    host memory         what is offloaded; 3pP/D for the copy of weights and moments that `checkpoint.async` stages

Not counted: what is outside the allocator (on CUDA a context of 1 to 1.5 GiB, and NCCL's buffers), fragmentation,
and what kernels allocate inside. NCCL lets the allocator reuse a buffer that a pipeline has sent or received only when
all transfers posted before it was freed have ended: the further the host is ahead of its GPU, the more of them live.
That does not exhaust memory: before it gives up, the allocator waits for them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megalite.config.errors import InputError
from megalite.config.schema import Config
from megalite.plan.activations import Activations, Item
from megalite.plan.pipeline import actions, as_full, fullest_steps, table_of, tables_of
from megalite.plan.recompute import Cost, Mode, modes_by_stage
from megalite.plan.split import split_of
from megalite.plan.walk import HOST, Walk

Modes = Mapping[int, Sequence[Mode]]  # by stage, of its layers
KINDS = ("parameters", "gathered weights", "gradients", "optimizer states", "activations", "temporaries")
FORWARDS: dict[Mode, float] = {"none": 3.0, "selective": 3.1, "full": 4.0}  # time of a layer, in forward passes


@dataclass(frozen=True)
class Memory:
    """Bytes on one pipeline rank at the peak of the fullest step of a run; of host memory, at a peak of its own."""

    pp: int
    bytes: dict[Item, int]
    micro_batches: int  # of that step

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(size for (kind, _), size in self.bytes.items() if kind != HOST)

    def of(self, kind: str) -> dict[str, int]:
        """Bytes of one kind by component."""
        return {component: size for (found, component), size in self.bytes.items() if found == kind}


def rank_memory(config: Config, pp: int) -> Memory:
    """The predicted memory of pipeline rank `pp`; `parallel.dp_shard` and `batch.micro` must be numbers.

    Raises InputError for a schedule that cannot run.
    """
    return _fullest(config, pp, recompute_modes(config))


def memory_of_ranks(config: Config) -> list[Memory]:
    """The predicted memory of every pipeline rank; the ranks of its data, context and tensor parallelism are alike."""
    return list(each_rank(config))


def each_rank(config: Config) -> Iterator[Memory]:
    """`memory_of_ranks` one by one, so that who has seen enough can stop."""
    modes = recompute_modes(config)
    return (_fullest(config, pp, modes) for pp in range(config.parallel.pp))


def actions_of_peaks(config: Config) -> int:
    """How many actions the schedules have along which `memory_of_ranks` walks."""
    return sum(actions(config, as_full(config, m)) for m in fullest_steps(config))


def enough_micro_batches(config: Config, pp: int, full: int) -> int:
    """The least number of micro-batches whose peak on pipeline rank `pp` is that of a step of `full`."""
    p, modes = config.parallel.pp, recompute_modes(config)
    wanted = _peak(config, pp, full, modes)
    for m in sorted({1, 2, 3, *(2**i for i in range(2, 12)), *(p * i for i in range(1, 9))}):
        if m >= full:
            break
        try:
            if _peak(config, pp, m, modes) == wanted:
                return m
        except InputError:  # the schedule cannot have so few
            continue
    return full


def _fullest(config: Config, pp: int, modes: Modes) -> Memory:
    inputs = Activations(config).inputs
    steps = []
    for m in fullest_steps(config):
        peak = _peak(config, pp, m, modes)
        steps.append(Memory(pp, peak | staged(config, peak) | {("activations", "inputs"): m * inputs}, m))
    return max(steps, key=lambda memory: memory.total)


def staged(config: Config, held: Mapping[Item, int]) -> dict[Item, int]:
    """Host memory of the copy that a save in the background writes; it is kept from the first save on.

    held: what a rank holds, whose parameters and their two moments are copied. Of a tied embedding, a checkpoint has a
    single weight, also where both copies are on one rank.
    """
    if not config.checkpoint.async_:
        return {}
    weights = {component: size for (kind, component), size in held.items() if kind == "parameters"}
    if config.model.tie_embeddings and "embedding" in weights:
        weights.pop("head", None)
    return {(HOST, "checkpoint"): 3 * sum(weights.values())}


def _peak(config: Config, pp: int, m: int, modes: Modes) -> dict[Item, int]:
    """What a rank holds at the peak of a step of `m` micro-batches, without its inputs."""

    def walk(m: int) -> Counter[Item]:
        return Counter(Walk(config, table_of(config, m), pp, modes).run())

    if config.parallel.pipeline.schedule != "gpipe":
        return walk(as_full(config, m))
    few = 32
    while few < m:  # once a micro-batch more means more activations at the peak, so does every one after it
        steps = [walk(few - 2), walk(few - 1), walk(few)]
        before, growth = ({item: b[item] - a[item] for item in a | b} for a, b in pairwise(steps))
        grow = {kind == HOST for (kind, _), size in growth.items() if size > 0}
        if growth == before and grow == {False, config.train.offload_activations}:
            return {item: size + (m - few) * growth[item] for item, size in steps[-1].items()}
        few *= 2
    return walk(m)


def recompute_modes(config: Config) -> Modes:
    """By stage: the mode of each of its layers.

    Where a budget is set, runs choose by costs that they measure; here kept bytes come from `plan.activations` and
    times from FLOPs, with a little for selective. Raises InputError for a budget that nothing fits.
    """
    sizes, split = Activations(config), split_of(config)

    def costs() -> dict[Mode, Cost]:
        return {mode: Cost(seconds, sizes.layer_bytes(mode)) for mode, seconds in FORWARDS.items()}

    return modes_by_stage(config.train, lambda: tables_of(config), split, sizes.outside(len(split)), costs)
