"""Saving and resuming a run: a PyTorch Distributed Checkpoint of global tensors under global names.

A checkpoint is written under a temporary name and renamed when every rank has written its part, so a folder
named `step-XXXXXXXX` is complete. The newest is found by looking.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config

NAME = re.compile(r"step-(\d{8,})")
MOMENTS = ("exp_avg", "exp_avg_sq")
PROGRESS = "progress.json"
METADATA = ".metadata"  # DCP's own index, written last
Stages = Mapping[int, nn.Module]  # a rank's stages by their global number


@dataclass(frozen=True)
class Progress:
    """How far a run has come. `samples` is the whole data state."""

    step: int  # optimizer steps taken
    samples: int  # sequences consumed
    model: dict[str, object]  # the model section of the configuration


def save(folder: Path, stages: Stages, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Write a checkpoint into `folder` and return its path. Collective over all ranks."""
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f"{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with _explained(f"{partial}: cannot be written"):
        dcp.save(_tensors(stages, optimizer), checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / PROGRESS).write_text(json.dumps(asdict(progress), indent=2))
        partial.rename(final)
    dist.barrier()
    return final


def load(path: Path, stages: Stages, optimizer: torch.optim.Optimizer, config: Config) -> Progress:
    """Fill the weights and the optimizer's state from the checkpoint at `path`, whatever layout wrote it.

    Raises InputError for a checkpoint of another model.
    """
    progress = read_progress(path)
    _refuse_other_model(path, progress, config)
    with _explained(f"{path}: cannot be read"):
        dcp.load(_tensors(stages, optimizer), checkpoint_id=path)
    for first, *copies in _named(stages).values():
        optimizer.state[first]["step"].fill_(progress.step)
        for copy in copies:
            copy.data.copy_(first.data)
            optimizer.state[copy] = {key: value.clone() for key, value in optimizer.state[first].items()}
    return progress


def load_weights(path: Path, stages: Stages, config: Config) -> Progress:
    """Fill the weights alone."""
    progress = read_progress(path)
    _refuse_other_model(path, progress, config)
    with _explained(f"{path}: cannot be read"):
        dcp.load(_weights(stages), checkpoint_id=path)
    for first, *copies in _named(stages).values():
        for copy in copies:
            copy.data.copy_(first.data)
    return progress


def read_progress(path: Path) -> Progress:
    try:
        progress = Progress(**json.loads((path / PROGRESS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a complete checkpoint: {error}") from None
    if not (path / METADATA).is_file():
        raise InputError(f"{path} is not a complete checkpoint: it has no {METADATA}")
    return progress


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint tells."""
    return int(path.name.removeprefix("step-"))


def retain(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what interrupted saves left; 0 keeps all."""
    for path in complete(folder)[:-keep] if keep else []:
        shutil.rmtree(path)
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path)


def _tensors(stages: Stages, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by global name; moments that do not exist yet are made as zeros."""
    tensors = _weights(stages)
    for name, (param, *_) in _named(stages).items():
        state = optimizer.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state |= {moment: torch.zeros_like(param) for moment in MOMENTS}
        tensors |= {f"optimizer.{moment}.{name}": state[moment] for moment in MOMENTS}
    return tensors


def _weights(stages: Stages) -> dict[str, Tensor]:
    return {f"model.{name}": param.detach() for name, (param, *_) in _named(stages).items()}


def _named(stages: Stages) -> dict[str, list[nn.Parameter]]:
    """Parameters by global name: one of each, but for a tied embedding whose two copies are on this rank."""
    found: dict[str, list[nn.Parameter]] = {}
    for stage in stages.values():
        for name, param in stage.named_parameters():
            found.setdefault(name, []).append(param)
    return found


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """DCP's exception is not an `Exception`, and buries the cause under the traceback of every rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise InputError(f"{what}: rank {rank}: {cause!r}") from error


def _refuse_other_model(path: Path, progress: Progress, config: Config) -> None:
    free = {"sequence_length", "init_std"}  # no tensor's shape or meaning depends on them
    here = asdict(config.model)
    problems = [
        Problem(f"model.{key}", f"the checkpoint {path} has {progress.model.get(key)!r}", value=value)
        for key, value in here.items()
        if key not in free and progress.model.get(key) != value
    ]
    if problems:
        raise InputError(problems)
