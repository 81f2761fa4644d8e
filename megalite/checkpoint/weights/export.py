"""Exports checkpoints of a run for other programs, as `checkpoint.export` says."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megalite.base.files import is_folder
from megalite.checkpoint.store.disk import synchronize
from megalite.checkpoint.store.retain import make_room
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import huggingface, peft
from megalite.checkpoint.weights.formats.tokenizer import doubts
from megalite.checkpoint.weights.maps.families import is_known
from megalite.checkpoint.weights.read import factors_of
from megalite.checkpoint.weights.sources import open_checkpoint
from megalite.config.schema import Checkpoint, Config

DTYPES = {"bf16": "bfloat16"}  # data type of exported weights, where it is not their own, by precision of the run


def is_due(checkpoint: Checkpoint, step: int, last: int) -> bool:
    """Return whether the checkpoint of `step` is exported; `last` is the last step of the run."""
    every = checkpoint.export_every
    return checkpoint.export is not None and (step == last or (every > 0 and step % every == 0))


def export(checkpoint: Path, config: Config, advanced: Callable[[], None]) -> tuple[str, ...]:
    """Write the export of a checkpoint, in place of an older one. Returns warnings. Raises InputError and OSError.

    The model of an adapter's checkpoint is its base with the adapter merged into it.

    advanced: called as the work proceeds.
    """
    target = export_of(checkpoint)
    fresh = target.with_name(f"{target.name}.new")
    if is_folder(fresh, follow=False):  # remains of an attempt that was stopped, perhaps of another checkpoint
        shutil.rmtree(fresh)
    kind, dtype = config.checkpoint.export, DTYPES.get(config.train.dtype)
    found = replace(open_checkpoint(checkpoint), hashes={}).folded()  # it has just been written
    warnings: tuple[str, ...] = ()
    if kind == "peft":  # factors stay in float32, as they are trained
        dtype, plan, written = None, peft.plan(found, None), factors_of(found)
    else:
        left_out = found.model.mtp is not None and not is_known(found.model)
        found = found.without_mtp() if left_out else found
        plan, written = huggingface.plan(found, dtype, None), found
        warnings = doubts(found, huggingface.model_type(found))
        if left_out:
            warnings += ("layers of multi-token prediction are left out, for which the family has no place",)
    convert(written, plan, fresh, {"to": kind, "dtype": dtype}, 1, lambda _: advanced())
    make_room(target)  # an export of an earlier checkpoint of this step
    fresh.rename(target)
    synchronize(target.parent)
    return warnings


def export_of(checkpoint: Path) -> Path:
    """Path of the export of a run's checkpoint."""
    return checkpoint.parent.parent / "export" / checkpoint.name
