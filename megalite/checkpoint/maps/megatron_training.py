"""The state of training in Megatron-LM's files: counts, and options of the optimizer and of its schedule.

Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megalite.checkpoint.maps.family import Fields
from megalite.checkpoint.progress import Progress, Training
from megalite.config.schema import Config, Model, Optim

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "WSD",
    "inverse_sqrt": "inverse-square-root",
}
SHARDING = "fully_reshardable"  # how the distributed optimizer's tensors are named and cut: as those of the model
LARGEST = 1 << 40  # steps, and samples
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}  # Megatron finds one by


def training_of(
    content: Mapping[Any, Any],
    arguments: Mapping[str, Any],
    model: Model,
    file: str,
    whole: Callable[[Any], int | None],
) -> Training:
    """The state of the training that saved `content`, with these arguments, in `file`.

    whole: returns the whole number that a value of `content` is, or that a tensor there holds, if it does. Raises
    InputError for an optimizer other than AdamW, and where the counts are not told.
    """
    fields = Fields(f"{file}: args", arguments)
    if (name := fields.get("optimizer", "adam")) != "adam":
        raise fields.wrong("optimizer", f"megalite has no states of {name!s:.40}; only those of adam are taken along")
    step = _count(Fields(file, content), "iteration")
    samples = _count(fields, "consumed_train_samples")
    counts = (whole(found) for found in _steps(content))
    updates = next((count for count in counts if count is not None and 0 <= count <= step), step)
    length = fields.whole("seq_length", model.sequence_length)
    progress = Progress(step=step, updates=updates, samples=samples, tokens=samples * length)
    optim = Optim(
        lr=fields.number("lr", Optim.lr),
        betas=[fields.number("adam_beta1", 0.9), fields.number("adam_beta2", 0.999)],
        eps=fields.number("adam_eps", 1e-8),
        weight_decay=fields.number("weight_decay", 0.01),
        clip_norm=fields.number("clip_grad", 1.0),
    )
    return Training(progress, Config(model=model, optim=optim))


def _count(fields: Fields, key: str) -> int:
    found = fields.get(key)
    if type(found) is not int or not 0 <= found < LARGEST:
        raise fields.wrong(key, "must be a count, which tells how far the run has come")
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
    """What is saved beside the arguments, under Megatron's names.

    It serves its optimizer in float32, that with main parameters, and the distributed one, which look in different
    places. Units of the schedule are samples, as Megatron's are.
    """
    progress, optim, batch = training.progress, training.config.optim, training.config.batch.global_
    rate = training.rate
    schedule, last = training.config.schedule, training.config.train.steps * batch
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
        "optimizer": {**options, "optimizer": options, "param_state_sharding_type": SHARDING},
        "opt_param_scheduler": {
            "max_lr": optim.lr,
            "min_lr": optim.lr * floor,
            "lr_warmup_steps": schedule.warmup * batch,
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
    """The arguments that tell of training."""
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
