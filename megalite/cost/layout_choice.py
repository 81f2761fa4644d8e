"""A layout as far as a search decides it, and how a configuration gets it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from megalite.config.parallel_schema import DataMode
from megalite.config.schema import Config, Place, place_of
from megalite.plan.recompute_modes import MODES, Mode
from megalite.schedule.generate import AUTO_SCHEDULE

# Keys that a search decides, unless they are pinned.
SEARCH_KEYS = (
    "parallel.tp",
    "parallel.ep",
    "parallel.cp",
    "parallel.context.method",
    "parallel.pp",
    "parallel.pipeline.schedule",
    "parallel.pipeline.virtual_stages",
    "parallel.pipeline.split",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.data.mode",
    "batch.micro",
    "train.recompute",
    "train.offload_activations",
    "optim.placement",
)


Method = Literal["ring", "ulysses", "all_gather"]
Recomputed = Literal["none", "selective", "full", "budget"]


class Choice(NamedTuple):
    """A layout, as far as a search decides it.

    states: place of the optimizer's, as `optim.placement` has it. split: layers of every stage; None: as
    `plan.split.balance` has them.
    """

    tp: int
    ep: int
    cp: int
    method: Method
    pp: int
    micro: int
    recompute: Recomputed
    schedule: str
    virtual: int | None
    replicas: int
    shards: int
    mode: DataMode
    offload_activations: bool
    states: str
    split: tuple[int, ...] | None = None

    @property
    def place(self) -> Place:
        """Place of the optimizer's states."""
        return place_of(self.states)

    def micro_batches(self, sequences: int) -> int:
        """Micro-batches in a step of so many sequences."""
        return sequences // (self.replicas * self.shards * self.micro)

    def applied(self, config: Config, pins: Mapping[str, Any]) -> Config:
        """`config` with this layout. Pinned fields that are not part of a choice stay as they are."""
        parallel, train = config.parallel, config.train
        free, searched = "train.recompute" not in pins, self.schedule == AUTO_SCHEDULE
        return replace(
            config,
            parallel=replace(
                parallel,
                tp=self.tp,
                ep=self.ep,
                cp=self.cp,
                pp=self.pp,
                dp_replicate=self.replicas,
                dp_shard=self.shards,
                context=replace(parallel.context, method=self.method),
                data=replace(parallel.data, mode=self.mode),
                pipeline=replace(
                    parallel.pipeline,
                    schedule=self.schedule,
                    virtual_stages=self.virtual,
                    split=None if self.split is None else list(self.split),
                    memory=parallel.pipeline.memory if searched else None,
                ),
            ),
            batch=replace(config.batch, micro=self.micro, memory=config.batch.memory if searched else None),
            train=replace(
                train,
                recompute=self.recompute,
                recompute_every=1 if free else train.recompute_every,
                recompute_budget=None if free else train.recompute_budget,
                offload_activations=self.offload_activations,
            ),
            optim=replace(
                config.optim,
                placement=self.states,
                update_on=config.optim.update_on if self.states == "host" else "device",
            ),
        )


def choice_of(config: Config) -> Choice:
    """The layout of a checked configuration."""
    parallel = config.parallel
    return Choice(
        parallel.tp,
        parallel.ep,
        parallel.cp,
        parallel.context.method,
        parallel.pp,
        config.batch.micro_size,
        config.train.recompute,
        parallel.pipeline.schedule,
        parallel.pipeline.virtual_stages,
        parallel.dp_replicate,
        parallel.layout.dp_shard,
        parallel.data_mode,
        config.train.offload_activations,
        config.optim.placement,
        None if parallel.pipeline.split is None else tuple(parallel.pipeline.split),
    )


def mode_of(choice: Choice) -> Mode:
    """Recompute mode of layers; "none" for a budget, under which layers take at least as long as without recompute."""
    return next((mode for mode in MODES if mode == choice.recompute), "none")


def places(config: Config, offload: bool) -> list[str]:
    """Places of the optimizer's states to try: the host where trained parameters are, else the device, or both."""
    if config.on_host(trained=True):
        return ["host"]
    return ["device", "host"] if offload else ["device"]
