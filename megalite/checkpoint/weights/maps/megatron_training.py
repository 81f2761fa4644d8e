"""The state of training in Megatron-LM's files: counts, and options of the optimizer and of its schedule.

Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from megalite.base.errors import InputError
from megalite.base.json_shape import ValueKind, misfits, whole
from megalite.checkpoint.store.progress import Progress, Training, impossible
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.config.convert import to_plain
from megalite.config.model_schema import Model
from megalite.config.rules.optim import optim_rules
from megalite.config.rules.ranges import range_rules
from megalite.config.schema import Config, Optim
from megalite.plan.batches import samples_after

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "WSD",
    "inverse_sqrt": "inverse-square-root",
}
SHARDING = "fully_reshardable"  # how the distributed optimizer's tensors are named and cut: as those of the model
MAX_COUNT = 1 << 40  # steps, and samples
MAX_TOKENS = 1 << 62
OPTIMIZER_HINT = "leave --optimizer out to take the weights alone"
PROGRESS_KEY = "megalite"  # names the progress that megalite writes beside Megatron's own counts
PROGRESS_FIELDS = {
    **dict.fromkeys(("step", "updates", "samples", "tokens", "bad_steps"), whole(0, 62)),
    "left_out": [
        ValueKind("two whole numbers", lambda value: isinstance(value, list) and [*map(type, value)] == [int, int])
    ],
    "losses": [ValueKind("a number", lambda value: type(value) is float)],
}
GROUP = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
}  # keys by which Megatron finds a group of parameters


def training_of(
    content: Mapping[Any, Any],
    arguments: Mapping[str, Any],
    model: Model,
    file: str,
    number: Callable[[Any], int | None],
) -> Training:
    """The state of the training that saved `content`, with these arguments, in `file`.

    number: returns the whole number that a value of `content` is, or that a tensor there holds, if it does. Raises
    InputError for an optimizer other than AdamW, and where the counts are not told.
    """
    fields = Fields(f"{file}: args", arguments)
    if fields.get("optimizer", "adam") != "adam":
        raise fields.wrong("optimizer", f"only states of adam can be taken along; {OPTIMIZER_HINT}")
    step = _count(Fields(file, content), "iteration")
    samples = _count(fields, "consumed_train_samples")
    counts = (number(found) for found in _steps(content))
    updates = next((count for count in counts if count is not None and min(step, 1) <= count <= step), step)
    length = fields.whole("seq_length", model.sequence_length)
    if (tokens := samples * length) >= MAX_TOKENS:
        raise fields.wrong(
            "consumed_train_samples", f"means {tokens:,} tokens; a run has fewer than 2**62; {OPTIMIZER_HINT}"
        )
    progress = _kept(content.get(PROGRESS_KEY), step, samples) or Progress(step, updates, samples, tokens)
    optim = Optim(
        lr=fields.number("lr", Optim.lr),
        betas=[fields.number("adam_beta1", 0.9), fields.number("adam_beta2", 0.999)],
        eps=fields.number("adam_eps", 1e-8),
        weight_decay=fields.number("weight_decay", 0.01),
        clip_norm=fields.number("clip_grad", 1.0),
    )
    config = Config(model=replace(model, sequence_length=length), optim=optim)
    if problem := next(chain(range_rules(to_plain(config)), optim_rules(config)), None):
        raise InputError(f"{file}: args mean an optimizer that cannot be: {problem}; {OPTIMIZER_HINT}")
    return Training(progress, config)


def _kept(found: Any, step: int, samples: int) -> Progress | None:
    """The progress that megalite has left in the file; None if it is of another step, as where Megatron went on."""
    if not isinstance(found, dict) or next(misfits(found, PROGRESS_FIELDS, PROGRESS_KEY), None):
        return None
    left_out = tuple((first, end) for first, end in found["left_out"])
    progress = Progress(**{**found, "left_out": left_out, "losses": tuple(found["losses"])})
    return progress if (progress.step, progress.samples) == (step, samples) and not impossible(progress) else None


def _count(fields: Fields, key: str) -> int:
    found = fields.get(key)
    if type(found) is not int or not 0 <= found < MAX_COUNT:
        raise fields.wrong(key, f"must be a count, which tells how far the run has come; {OPTIMIZER_HINT}")
    return found


def _steps(content: Mapping[Any, Any]) -> Iterator[Any]:
    """The counts of updates that the kinds of optimizers keep, each at a place of its own."""
    outer = content.get("optimizer")
    for options in (outer.get("optimizer"), outer) if isinstance(outer, dict) else ():
        match options:
            case {"state": {"common_step": count}}:
                yield count
        match options:
            case {"param_groups": [{"step": count}, *_]}:
                yield count


def content_of(training: Training) -> dict[str, Any]:
    """Return what is saved beside the arguments, under Megatron's names.

    It serves Megatron's optimizer in float32, the one with main parameters, and the distributed one, which look in
    different places. Units of the schedule are samples, as Megatron's are.
    """
    progress, optim, batch = training.progress, training.config.optim, training.config.batch.global_
    rate = training.rate
    schedule, last = training.config.schedule, samples_after(training.config, training.config.train.steps)
    common = {
        **GROUP,
        "lr": rate,
        "betas": tuple(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "bias_correction": True,
        "step": progress.updates,
    }
    groups = [common, {**common, "wd_mult": 0.0, "weight_decay": 0.0}]  # the second: of norms and biases
    options = {"param_groups": groups, "state": {"common_step": progress.updates}}
    floor = 0.0 if schedule.name in ("constant", "inverse_sqrt") else schedule.floor
    decay = max(1, training.config.train.steps // 10) if schedule.decay is None else schedule.decay
    return {
        "iteration": progress.step,
        PROGRESS_KEY: {
            **asdict(progress),
            "left_out": [list(each) for each in progress.left_out],
            "losses": list(progress.losses),
        },
        "optimizer": {**options, "optimizer": options, "param_state_sharding_type": SHARDING},
        "opt_param_scheduler": {
            "max_lr": optim.lr,
            "min_lr": optim.lr * floor,
            "lr_warmup_steps": samples_after(training.config, schedule.warmup),
            "num_steps": progress.samples,
            "lr_decay_style": STYLES[schedule.name],
            "lr_decay_steps": last,
            "wsd_decay_steps": decay * batch,
            "start_wd": optim.weight_decay,
            "end_wd": optim.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": last,
        },
        "content_metadata": {
            "distrib_optim_sharding_type": SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
        "num_floating_point_operations_so_far": 0,
    }


def arguments_beside(training: Training) -> dict[str, Any]:
    """The arguments about training."""
    optim, schedule, batch = training.config.optim, training.config.schedule, training.config.batch.global_
    return {
        "iteration": training.progress.step,
        "consumed_train_samples": training.progress.samples,
        "global_batch_size": batch,
        "optimizer": "adam",
        "lr": optim.lr,
        "lr_decay_style": STYLES[schedule.name],
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_norm,
    }
