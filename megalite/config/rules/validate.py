"""Rules between configuration values. All broken ones are found, and each comes with a fix."""

from collections.abc import Collection
from dataclasses import replace

from megalite.base.errors import InputError, Problem
from megalite.config.convert import to_plain
from megalite.config.rules.adapter import adapter_rules
from megalite.config.rules.batch import batch_rules
from megalite.config.rules.data import data_rules
from megalite.config.rules.files import validate_files
from megalite.config.rules.graphs import graph_rules
from megalite.config.rules.model import model_rules
from megalite.config.rules.optim import optim_rules
from megalite.config.rules.parallel import parallel_rules, pinned_rules, shards, virtual_stages
from megalite.config.rules.ranges import range_rules
from megalite.config.rules.run import log_rules, profile_rules, run_rules
from megalite.config.rules.train import train_rules
from megalite.config.schema import Config

# Keys of rules that depend on what a layout recomputes and offloads.
LAYOUT_KEYS = ("train.recompute", "train.offload_activations", "optim.placement", "optim.update_on", "kernels.")


def check(config: Config, world_size: int | None = None) -> Config:
    """The configuration for a job of `world_size` ranks, with what other things settle filled in.

    `parallel.dp_shard` becomes a number, and `parallel.pipeline.virtual_stages` that of a schedule file. `world_size`
    is None where no launcher gives one. Raises `InputError` with every broken rule.
    """
    parallel = config.parallel
    parallel = replace(parallel, pipeline=replace(parallel.pipeline, virtual_stages=virtual_stages(parallel)))
    config = replace(config, parallel=parallel)
    if problems := validate(config, world_size):
        raise InputError(problems)
    return replace(config, parallel=replace(parallel, dp_shard=shards(parallel, world_size)))


def validate(config: Config, world_size: int | None = None) -> list[Problem]:
    """Every broken rule of a configuration, for a job of `world_size` ranks (None: no launcher gives one).

    No file is looked at: see `validate_files`.
    """
    model, parallel = config.model, config.parallel
    dp = parallel.dp_replicate * shards(parallel, world_size)
    ranks = dp * parallel.pp * parallel.cp * parallel.tp
    limits = parallel.pipeline.searched or parallel.data.mode == "auto"  # batch.memory decides these too
    return [
        *run_rules(config.run),
        *log_rules(config.log),
        *profile_rules(config.profile, config.train.steps, ranks),
        *range_rules(to_plain(config)),
        *model_rules(model),
        *adapter_rules(config),
        *parallel_rules(config, world_size),
        *batch_rules(config.batch, dp, model.sequence_length, parallel.sequence_parts, limits),
        *train_rules(config),
        *graph_rules(config, dp),
        *optim_rules(config),
        *data_rules(config.data, model.vocab_size),
    ]


def check_without_layout(config: Config, pinned: Collection[str] = (), searches: bool = True) -> None:
    """Raises `InputError` with every broken rule that no layout can change, such as those of the model's sizes.

    pinned: keys of the layout whose values every layout has. searches: a layout is looked for, which CUDA graphs
    refuse; else `check` decides about these.
    """
    of_layouts = tuple(key for key in LAYOUT_KEYS if key not in pinned)
    others = [*train_rules(config), *optim_rules(config)]
    problems = [
        *run_rules(config.run),
        *log_rules(config.log),
        *range_rules(to_plain(config)),
        *model_rules(config.model),
        *adapter_rules(config),
        *(problem for problem in others if not problem.key.startswith(of_layouts)),
        *(graph_rules(config, None) if searches else ()),
        *pinned_rules(config, pinned),
        *data_rules(config.data, config.model.vocab_size),
    ]
    if problems:
        raise InputError(problems)


def check_files(config: Config) -> None:
    """Raises `InputError` with every file that training needs and does not find."""
    if problems := validate_files(config):
        raise InputError(problems)
