"""Bytes that one pipeline rank holds at the peak of a training step, by kind and component.

The prediction walks through the rank's program, in the same table that the runner executes. On the way, the parts of
stages (`plan.activations`) keep activations from forward to backward, gradients accumulate or are reduced, and weights
are gathered and freed.

    P  parameters of the rank's stages before data-parallel sharding, N those of one part; for gradients and optimizer
       states, only those that are trained
    D  ranks over which parameters are sharded: dp_shard · cp, or 1 with mode ddp
    w  bytes of a compute weight    p  bytes of a sharded parameter    r  bytes of a gradient on the network

    parameters          pP/D; and wP of copies, if a single data-parallel rank computes in another precision than that
                        of its parameters, other than with zero3
    optimizer states    pP/D for each state: AdamW has two, Muon has one for a matrix inside of a layer
    gathered weights    wP through the step (ddp, zero1, zero2), beside another wN in the first forward, where a part is
                        copied out of its gather; or wN of the part in use (zero3); with a single
                        data-parallel rank only the latter, and not if it computes in the precision of its parameters
    gradients           rP until they are reduced, then pP/D. They are reduced after every micro-batch (zero2, zero3) or
                        after the last one (ddp, zero1). The part that was reduced last takes another rN until the
                        next part is reduced
    activations         see plan.activations
    temporaries         those of backward; wN of gradients being made; wN to gather the next part (zero3);
                        activations recomputed or fetched from the host; wN of the next part, if it comes from the
                        host and is not sharded; those of Muon's step (plan.muon); slots through which states and
                        trained parameters pass that live elsewhere (plan.state_streams)
    host memory         offloaded tensors; parameters and reduced gradients that live there; slots of states in files;
                        the copy of parameters and optimizer states that `checkpoint.async` stages
    files               optimizer states that live there, and the copy that `checkpoint.async` stages

CUDA graphs of micro-batches (`train.cuda_graph`) keep what they take from step to step: temporaries of an update come
on top of it, and so does evaluation, which is not counted.

Before parameters on the host are gathered over D ranks, FSDP2 copies the rank's shards to the device, wN/D. This is no
peak: once they are gathered they are freed, and wN is taken in their place to copy the part out of the gather.

FSDP2 of PyTorch 2.15 and newer adds up gradients otherwise, see `States.of_2_15`; the installed version counts.

Not counted: memory outside of the allocator (on CUDA a context of 1 to 1.5 GiB, and NCCL's buffers), fragmentation,
and memory that kernels allocate internally. The allocator may reuse a buffer that a pipeline has sent or received only
when NCCL has ended all transfers posted before the buffer was freed. So the further the host is ahead of its GPU, the
more such buffers live. They do not exhaust memory: before the allocator gives up, it waits for them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.automatic import Costing
from megalite.plan.memory.held import on_device
from megalite.plan.memory.moment_text import Instant
from megalite.plan.memory.walk import Walk
from megalite.plan.pipeline import actions, as_full, fullest_steps
from megalite.plan.resolved import Plan, resolve
from megalite.plan.units import Item

KINDS = ("parameters", "gathered weights", "gradients", "optimizer states", "activations", "temporaries")
ROW_KINDS = ("activations", "temporaries")  # kinds of memory that rows of tokens take


@dataclass(frozen=True)
class Memory:
    """Bytes on one pipeline rank at the peak of the fullest step of a run. Host memory is counted at its own peak."""

    pp: int
    bytes: dict[Item, int]
    micro_batches: int  # number in that step
    instant: Instant  # instant of the peak

    @property
    def total(self) -> int:
        """Bytes of all kinds on the device."""
        return on_device(self.bytes)

    def of(self, kind: str) -> dict[str, int]:
        """Bytes of one kind by component."""
        return {component: size for (found, component), size in self.bytes.items() if found == kind}


def rank_memory(config: Config, pp: int, costing: Costing | None = None) -> Memory:
    """The predicted memory of pipeline rank `pp`; `parallel.dp_shard` and `batch.micro` must be numbers.

    costing: as for `resolve`. Raises InputError for a schedule that cannot run.
    """
    return _fullest(resolve(config, costing=costing), pp)


def memory_of_ranks(config: Config, costing: Costing | None = None) -> list[Memory]:
    """The predicted memory of every pipeline rank, which all ranks with the same pp coordinate have in common.

    costing: as for `resolve`.
    """
    return list(each_rank(config, resolve(config, costing=costing)))


def each_rank(config: Config, plan: Plan) -> Iterator[Memory]:
    """The results of `memory_of_ranks` one by one, so that a caller can stop early. plan: of `config`."""
    return (_fullest(plan, pp) for pp in range(config.parallel.pp))


def actions_of_peaks(config: Config) -> int:
    """Number of actions in the schedules that `memory_of_ranks` walks through."""
    return sum(actions(config, as_full(config, m)) for m in fullest_steps(config))


def enough_micro_batches(plan: Plan, pp: int, full: int) -> int:
    """A small number of micro-batches with the same peak on pipeline rank `pp` as a step of `full` micro-batches."""
    p = plan.config.parallel.pp
    wanted, _ = _peak(plan, pp, full)
    for m in sorted({1, 2, 3, *(2**i for i in range(2, 12)), *(p * i for i in range(1, 9))}):
        if m >= full:
            break
        try:
            if _peak(plan, pp, m)[0] == wanted:
                return m
        except InputError:  # the schedule cannot have so few
            continue
    return full


def crowded(config: Config, memory: Memory) -> int:
    """The most bytes of a rank that needs `memory` where experts are chosen equally often.

    Every token of the ranks that share out experts then chooses as many of this one's as it can. All of a layer with
    experts is counted as rows. Buffers of a fixed size have room for them anyway.
    """
    experts, ep = config.model.experts, config.parallel.ep
    if experts is None or ep == 1 or config.parallel.fixed_buffers:
        return memory.total
    times = ep * min(experts.active, experts.count // ep) / experts.active
    rows = sum(memory.of(kind).get("mlp", 0) for kind in ROW_KINDS)
    return memory.total + round((times - 1) * rows)


def _fullest(plan: Plan, pp: int) -> Memory:
    inputs = Activations(plan.config).inputs
    steps = []
    for m in fullest_steps(plan.config):
        peak, instant = _peak(plan, pp, m)
        held = m + plan.config.train.cuda_graph  # micro-batches: graphs read theirs at a fixed place
        steps.append(Memory(pp, peak | {("activations", "inputs"): held * inputs}, m, instant))
    return max(steps, key=lambda memory: memory.total)


def _peak(plan: Plan, pp: int, m: int) -> tuple[dict[Item, int], Instant]:
    """Bytes that a rank holds at the peak of a step of `m` micro-batches, without the inputs of the step, and when."""
    config = plan.config

    def walk(m: int) -> tuple[Counter[Item], Instant]:
        walk = Walk(plan, m, pp)
        return Counter(walk.run()), walk.instant

    # Tensors on their way to the host are given back in steps, so that peaks with them lie on no line.
    if config.parallel.pipeline.schedule != "gpipe" or config.train.offload_activations:
        return walk(as_full(config, m))
    few = 32
    while few < m:  # if one more micro-batch adds activations to the peak, every further one adds as many
        *steps, (last, instant) = [walk(few - 2), walk(few - 1), walk(few)]
        counts = [*(step for step, _ in steps), last]
        before, growth = ({item: b[item] - a[item] for item in a | b} for a, b in pairwise(counts))
        if growth == before and any(growth.values()):
            grown = {item: size + (m - few) * growth[item] for item, size in last.items()}
            return grown, instant.of_last(few, m)
        few *= 2
    return walk(m)
