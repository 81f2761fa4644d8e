"""Exports checkpoints of a run for other programs, as `checkpoint.export` says."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megalite.base.files import is_folder
from megalite.checkpoint.store.disk import synchronize
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import huggingface
from megalite.checkpoint.weights.formats.tokenizer import doubts
from megalite.checkpoint.weights.sources import open_checkpoint
from megalite.config.schema import Checkpoint, Config

DTYPES = {"bf16": "bfloat16"}  # data type of exported weights, where it is not their own, by precision of the run


def is_due(checkpoint: Checkpoint, step: int, last: int) -> bool:
    """Return whether the checkpoint of `step` is exported; `last` is the last step of the run."""
    every = checkpoint.export_every
    return checkpoint.export is not None and (step == last or (every > 0 and step % every == 0))


def export(checkpoint: Path, config: Config, advanced: Callable[[], None]) -> tuple[str, ...]:
    """Write the export of a checkpoint, in place of an older one. Returns warnings. Raises InputError and OSError.

    advanced: called as the work proceeds.
    """
    target = export_of(checkpoint)
    fresh = target.with_name(f"{target.name}.new")
    if is_folder(fresh, follow=False):  # remains of an attempt that was stopped, perhaps of another checkpoint
        shutil.rmtree(fresh)
    found = replace(open_checkpoint(checkpoint), hashes={})  # it has just been written
    dtype = DTYPES.get(config.train.dtype)
    found = found.folded()
    plan = huggingface.plan(found, dtype, None)
    convert(found, plan, fresh, {"to": config.checkpoint.export, "dtype": dtype}, 1, lambda _: advanced())
    if is_folder(target, follow=False):  # export of an earlier checkpoint of this step
        shutil.rmtree(target)
    fresh.rename(target)
    synchronize(target.parent)
    return doubts(found, huggingface.model_type(found))


def export_of(checkpoint: Path) -> Path:
    """Path of the export of a run's checkpoint."""
    return checkpoint.parent.parent / "export" / checkpoint.name
