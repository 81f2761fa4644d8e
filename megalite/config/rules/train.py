"""Rules of the train section: what is recomputed in backward and offloaded, and what rollbacks need."""

import re
from collections.abc import Iterator
from dataclasses import asdict

from megalite.base.errors import Problem
from megalite.config.layout import FLOAT8_MULTIPLES
from megalite.config.model_schema import Experts
from megalite.config.remote import is_address, scheme_of
from megalite.config.schema import Config, Train

MAX_TOKENS = (1 << 63) - 1
PRODUCT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def train_rules(config: Config) -> Iterator[Problem]:
    """Every broken rule of the train section."""
    yield from _recompute(config.train, config.model.experts)
    yield from _rollback(config)
    yield from _deterministic(config)
    yield from _product(config.train)
    yield from _float8(config)
    yield from _export(config)
    yield from _export_url(config)
    yield from _at(config)
    yield from _local(config)
    yield from _stalls(config)
    tokens = config.train.steps * config.batch.global_ * config.model.sequence_length
    if tokens > MAX_TOKENS:
        rule = f"with batch.global and model.sequence_length makes {tokens:,} tokens, more than 64 bits can count"
        yield Problem("train.steps", rule, "use fewer steps", config.train.steps)


def _recompute(train: Train, experts: Experts | None) -> Iterator[Problem]:
    mode, every, budget = train.recompute, train.recompute_every, train.recompute_budget
    if every > 1 and mode not in ("selective", "full"):
        rule = f"has no meaning with train.recompute = {mode}"
        yield Problem("train.recompute_every", rule, "use 1, or train.recompute=selective or full", every)
    if mode == "budget" and budget is None:
        rule = "is needed for train.recompute = budget"
        yield Problem("train.recompute_budget", rule, "give the GiB of activations that a rank may keep", budget)
    if mode != "budget" and budget is not None:
        rule = f"has no meaning with train.recompute = {mode}"
        yield Problem("train.recompute_budget", rule, "use null, or train.recompute=budget", budget)
    if mode == "budget" and train.offload_activations:
        rule = "cannot be used with train.recompute = budget, which fits activations into the device's memory"
        yield Problem("train.offload_activations", rule, "use false, or another train.recompute", True)
    if train.compile and mode in ("selective", "budget"):
        rule = "cannot be used with train.compile, which itself makes cheap results again in backward"
        yield Problem("train.recompute", rule, "use none or full", mode)
    if train.compile and experts is not None:
        rule = "cannot be used with model.experts, of which no two steps have the same shapes"
        yield Problem("train.compile", rule, "use false", True)
    if train.compile and train.offload_activations:
        rule = "cannot be used with train.compile, which decides itself what is saved for backward"
        yield Problem("train.offload_activations", rule, "use false, or train.compile=false", True)


def _rollback(config: Config) -> Iterator[Problem]:
    for key, value in (("on_bad_step", config.train.on_bad_step), ("on_spike", config.train.on_spike)):
        if value == "rollback" and config.checkpoint.interval == 0:
            rule = "needs checkpoints to go back to, but checkpoint.interval = 0 saves at the end only"
            yield Problem(f"train.{key}", rule, "set checkpoint.interval", value)


def _export(config: Config) -> Iterator[Problem]:
    interval, every = config.checkpoint.interval, config.checkpoint.export_every
    if every and interval != "auto" and (interval == 0 or every % interval):
        rule = f"must be a multiple of checkpoint.interval = {interval}, since checkpoints are what is exported"
        yield Problem("checkpoint.export_every", rule, "change one of them, or use 0, only at the end", every)


def _export_url(config: Config) -> Iterator[Problem]:
    url, keep = config.checkpoint.export_url, config.checkpoint.export_keep
    if url is None:
        return
    if not is_address(url):
        rule = "must be http://HOST… or https://HOST… without a password, as it stands in records"
        yield Problem("checkpoint.export_url", rule, "as http://localhost:30000/update_weights_from_disk", url)
    if keep == 1:
        rule = "must not be 1 with checkpoint.export_url, or the folder that a server is reading could be deleted"
        yield Problem("checkpoint.export_keep", rule, "use 2 or more, or 0, which keeps all", keep)


def _at(config: Config) -> Iterator[Problem]:
    for index, step in enumerate(config.checkpoint.at):
        if not 1 <= step <= config.train.steps:
            rule = f"must be a step of the run: from 1 to train.steps = {config.train.steps}"
            yield Problem(f"checkpoint.at[{index}]", rule, "leave it out", step)


def _local(config: Config) -> Iterator[Problem]:
    local = config.checkpoint.local
    if local is not None and not (local.path.startswith("/") and local.path.isprintable()):
        rule = "must be an absolute path of printable characters, as every node looks for it by itself"
        yield Problem("checkpoint.local.path", rule, "use /dev/shm, or a folder on a disk of each node", local.path)


def _stalls(config: Config) -> Iterator[Problem]:
    timeout, data = config.train.timeout, config.data
    remote = any(scheme_of(source.path) is not None for source in (*data.train, *data.valid))
    if remote and data.remote.timeout >= timeout:
        rule = f"must be below train.timeout = {timeout:g}, which ends a job that waits as long for its data"
        yield Problem("data.remote.timeout", rule, "lower it, or raise train.timeout", data.remote.timeout)


def _product(train: Train) -> Iterator[Problem]:
    if train.product != "plain" and not PRODUCT.fullmatch(train.product):
        rule = "must be plain, or the module and the name of an object: MODULE:OBJECT"
        yield Problem("train.product", rule, "use plain, for PyTorch's products", train.product)


def _float8(config: Config) -> Iterator[Problem]:
    train, cp = config.train, config.parallel.cp
    if train.precision != "fp8":
        return
    if train.compile and config.parallel.tp * cp > 1:
        rule = "cannot be used with train.precision = fp8 over tp or cp, whose exchange of scales is not compiled"
        yield Problem("train.compile", rule, "use false, or train.precision=bf16", True)
    if train.product != "plain":
        rule = f"cannot be used with train.product = {train.product}, which computes the same products"
        yield Problem("train.precision", rule, "use bf16, or train.product=plain", "fp8")
    if config.model.mtp is not None:
        rule = "cannot be used with model.mtp, whose projection has no product in 8 bits"
        yield Problem("train.precision", rule, "use bf16, or model.mtp=null", "fp8")
    if config.model.attention.latent is not None:
        rule = "cannot be used with model.attention.latent, whose small products would be cast more than computed"
        yield Problem("train.precision", rule, "use bf16", "fp8")
    lengths = {"model.sequence_length": config.model.sequence_length}
    if config.batch.curriculum is not None:  # sequences grow by multiples of the first length
        lengths["batch.curriculum.start"] = config.batch.curriculum.start
    multiple, least = FLOAT8_MULTIPLES[train.float8_recipe], FLOAT8_MULTIPLES["tensorwise"] * cp
    by, wanted, required = f"{multiple}", "train.precision = fp8", multiple * cp
    if train.float8_recipe == "mx":  # in every layout, the same tokens share a scale
        chunks, wanted = config.parallel.chunks, "train.float8_recipe = mx"
        by, required = by + (f" · {chunks} chunks" if chunks > 1 else ""), required * chunks
    by += f" · parallel.cp = {required}" if cp > 1 else ""
    for key, length in lengths.items():
        if length % required:
            other = "train.precision=bf16" if length % least else "train.float8_recipe=tensorwise"
            yield Problem(key, f"must be divisible by {by} with {wanted}", f"change it, or use {other}", length)


def _deterministic(config: Config) -> Iterator[Problem]:
    apex = [name for name, kernel in asdict(config.kernels_by_operation).items() if kernel == "apex"]
    if config.train.deterministic and apex:
        rule = f"cannot be used with kernels.{apex[0]} = apex, which does not promise to repeat itself"
        yield Problem("train.deterministic", rule, f"use false, or kernels.{apex[0]}=auto", True)
