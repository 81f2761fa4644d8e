"""Request to `megalite plan`: the model and batch, the cluster, and the limits."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from megalite.base.errors import InputError
from megalite.commands.plan.amounts import DEFAULT_CLUSTER
from megalite.commands.plan.global_batch import usual_batch
from megalite.config.load import is_set, load
from megalite.config.rules.validate import check, check_without_layout
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.layout_choice import SEARCH_KEYS, Choice
from megalite.cost.predict import Prediction, predict
from megalite.cost.program import MEGALITE, NATURAL_LOAD
from megalite.cost.stages import Timer
from megalite.layout_search.search import Found, fullest_rank, search
from megalite.plan.memory.fit import GIB, TENSOR_SHARE, fitted
from megalite.plan.memory.peak import Memory


@dataclass(frozen=True)
class Asked:
    """One question. limit: bytes that tensors may take on a GPU. pins: keys that keep the values of the configuration.

    tokens, days, budget: of the run, where they were given. device: the configuration's own `run.device`; a plan is
    for CUDA where that is auto. batch: whether `batch.global` was given, follows from the tokens, or is the default.
    routing: how tokens choose experts.
    """

    config: Config
    cluster: Cluster
    limit: float
    pins: Mapping[str, Any]
    tokens: float | None
    days: float | None
    budget: float | None
    offload: bool
    device: Literal["auto", "cpu", "cuda"]
    batch: Literal["given", "by tokens", "default"] = "given"
    routing: Literal["balanced", "natural"] = "balanced"

    @cached_property
    def timer(self) -> Timer:
        load = NATURAL_LOAD if self.routing == "natural" else MEGALITE.load
        return Timer(self.cluster, program=replace(MEGALITE, load=load))

    def search(
        self, gpus: int, wanted: int, exhaustive: bool = False, tell: Callable[[Found], object] = lambda _: None
    ) -> Found:
        """The best layouts on `gpus` GPUs. tell: is called now and then with those that are found so far."""
        found = search(
            self.config,
            gpus,
            self.timer,
            self.limit,
            self.pins,
            wanted=wanted,
            offload=self.offload,
            exhaustive=exhaustive,
            tell=tell,
        )
        del found.results[wanted:]  # an exhaustive search has all that fit
        return found

    def predict(self, config: Config) -> tuple[Prediction, Memory]:
        """Time and memory of a checked configuration."""
        return predict(config, self.cluster, self.timer), fullest_rank(config, self.timer)

    def applied(self, choice: Choice) -> Config:
        return choice.applied(self.config, self.pins)


def ask(args: argparse.Namespace, files: list[str] | None = None, searches: bool = True) -> Asked:
    """The question that the command line asks. Raises InputError for a bad one.

    files: in place of its own. searches: a layout is looked for, so a batch may be chosen as well.
    """
    files = args.files if files is None else files
    config = load(files, args.overrides)
    device = config.run.device
    if config.run.device == "auto":  # a cluster's, whatever this machine has
        config = replace(config, run=replace(config.run, device="cuda"))
    pinned = {override.partition("=")[0] for override in args.overrides}
    batch: Literal["given", "by tokens", "default"] = "given"
    if "batch.global" not in pinned and not is_set(files, "batch.global"):
        batch = "by tokens" if args.tokens and searches else "default"
    if batch == "by tokens":
        chosen = usual_batch(args.tokens, config.model.sequence_length, args.gpus or ())
        config = replace(config, batch=replace(config.batch, global_=chosen))
    whole = {section for section in pinned if any(key.startswith(f"{section}.") for key in SEARCH_KEYS)}
    if whole:
        raise InputError(f"{min(whole)}: megalite plan takes keys of their own, such as {min(whole)}.… = VALUE")
    open_keys = {
        key for key in ("batch.micro", "parallel.data.mode", "parallel.dp_shard") if attrgetter(key)(config) == "auto"
    }
    pins = {key: value for key, value in layout_keys(config).items() if key in pinned - open_keys and value is not None}
    check_without_layout(config, pins, searches)
    if args.routing is not None and config.model.experts is None:
        raise InputError("--routing: has no meaning without model.experts; leave it out")
    if args.routing == "natural" and config.model.experts is not None and config.model.experts.force_balance:
        raise InputError("--routing natural: model.experts.force_balance = true balances it; leave one of them out")
    routing: Literal["balanced", "natural"] = args.routing or "balanced"
    cluster = _cluster(args, config)
    limit = args.max_memory * GIB if args.max_memory else cluster.gpu.memory * TENSOR_SHARE
    if args.max_memory and config.parallel.pipeline.searched:
        config = replace(config, batch=replace(config.batch, memory=args.max_memory))
    of_run = args.tokens, args.days, args.budget
    return Asked(config, cluster, limit, pins, *of_run, args.offload, device, batch, routing)


def _cluster(args: argparse.Namespace, config: Config) -> Cluster:
    """Load the cluster that the option names, or else `run.cluster`, or else the usual one."""
    if args.cluster is None and config.run.cluster is not None:
        return load_cluster(config.run.cluster, "run.cluster = ")
    return load_cluster(args.cluster or DEFAULT_CLUSTER)


def as_is(asked: Asked, gpus: int | None) -> Config:
    """The configuration with its own layout, checked. Raises InputError for one that cannot be."""
    if asked.config.batch.micro == "auto":
        rule = "is looked for by a search; megalite plan --as-is needs a number"
        raise InputError(f"batch.micro = auto: {rule}: batch.micro=1, for example")
    return fitted(check(asked.config, gpus), round(asked.limit), costing=asked.timer.costs)


def layout_keys(config: Config) -> dict[str, Any]:
    """The keys that a search decides, with their values in `config`."""
    return {key: attrgetter(key)(config) for key in SEARCH_KEYS}


def as_overrides(config: Config) -> list[str]:
    """The layout of `config` as arguments of a command line."""
    kept = ("train.recompute_every", "train.recompute_budget", "batch.memory")
    keys = layout_keys(config) | {key: attrgetter(key)(config) for key in kept}
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
