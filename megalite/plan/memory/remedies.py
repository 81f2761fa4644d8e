"""Components that fill a GPU that ran out of memory, and settings that are predicted to make training fit."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from megalite.base.errors import InputError
from megalite.config.parallel_schema import Placement
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.plan.memory.fit import TENSOR_SHARE, choices, peak_bytes, with_mode
from megalite.plan.memory.peak import KINDS, memory_of_ranks
from megalite.plan.recompute_modes import Mode
from megalite_launch.base.texts import memory_text

LISTED = 5  # components
RELIEF = 0.95  # a remedy needs at most this share of the present peak, which was predicted to fit, but did not
MAX_TP = 8  # ranks: more are seldom on one node
Change = tuple[str, Config]  # `key=value`, and the configuration with it


def out_of_memory_text(config: Config, total: int) -> str:
    """The largest components of the predicted peak of `config`, and changes with which it is predicted to fit.

    config: of a job, with numbers for what was auto. total: bytes of the smallest GPU. Raises InputError for a schedule
    that cannot run.
    """
    fullest = max(memory_of_ranks(config), key=lambda memory: memory.total)
    sizes = {f"{kind} ({component})": size for kind in KINDS for component, size in fullest.of(kind).items()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LISTED]
    limit = int(min(TENSOR_SHARE * total, RELIEF * fullest.total))
    found = [fitting for changes in _remedies(config) if (fitting := _first_that_fits(changes, config, limit))]
    fix = f"one of these would fit: {', '.join(found)}" if found else "more ranks must share the model"
    return (
        f"out of memory: pipeline rank {fullest.pp} needs {memory_text(fullest.total)} at the peak of a step, as "
        f"predicted, of {memory_text(total)}, beside CUDA's context and buffers of NCCL; largest are "
        f"{', '.join(f'{name} {memory_text(size)}' for name, size in largest)}; {fix}"
    )


def _first_that_fits(changes: Iterable[Change], config: Config, limit: int) -> str | None:
    for text, changed in changes:
        with suppress(InputError):  # a setting that others rule out
            if peak_bytes(check(changed, config.parallel.layout.world_size), limit) <= limit:
                return text
    return None


def _remedies(config: Config) -> Iterator[Iterator[Change]]:
    """Changes of one subject each, the gentlest first, and in each the least change first."""
    yield _smaller_batches(config)
    yield _recompute(config)
    yield _modes(config)
    yield _offload(config)
    yield _more_tp(config)


def _smaller_batches(config: Config) -> Iterator[Change]:
    for micro in choices(config):
        if micro < config.batch.micro_size:
            yield f"batch.micro={micro}", replace(config, batch=replace(config.batch, micro=micro))


def _recompute(config: Config) -> Iterator[Change]:
    train = config.train
    every = "" if train.recompute_every == 1 else " train.recompute_every=1"
    modes: tuple[Mode, ...] = ("selective", "full")
    for mode in modes:
        changed = replace(train, recompute=mode, recompute_every=1, recompute_budget=None)
        yield f"train.recompute={mode}{every}", replace(config, train=changed)


def _modes(config: Config) -> Iterator[Change]:
    return ((f"parallel.data.mode={mode}", with_mode(config, mode)) for mode in config.parallel.data_modes)


def _offload(config: Config) -> Iterator[Change]:
    if config.optim.place == "device":
        yield "optim.placement=host", replace(config, optim=replace(config.optim, placement="host"))
    if not config.train.offload_activations:
        changed = replace(config.train, offload_activations=True)
        yield "train.offload_activations=true", replace(config, train=changed)
    if config.parallel.placement.parameters == "device":
        yield _parameters_on_host(config)


def _parameters_on_host(config: Config) -> Change:
    if moved := config.adapter is None and config.optim.place == "device":
        config = replace(config, optim=replace(config.optim, placement="host"))
    there = replace(config, parallel=replace(config.parallel, placement=Placement("host")))
    keys = "parallel.placement.parameters=host parallel.data.mode=zero3" + " optim.placement=host" * moved
    return keys, with_mode(there, "zero3")


def _more_tp(config: Config) -> Iterator[Change]:
    parallel = config.parallel
    tp, shards = parallel.tp * 2, parallel.layout.dp_shard // 2
    while tp <= MAX_TP and shards >= 1 and tp * shards == parallel.tp * parallel.layout.dp_shard:
        changed = replace(parallel, tp=tp, dp_shard=shards)
        yield f"parallel.tp={tp} parallel.dp_shard={shards}", replace(config, parallel=changed)
        tp, shards = tp * 2, shards // 2
