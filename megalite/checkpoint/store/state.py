"""Content of a checkpoint: the global tensors of a run under global names, and its progress as tensors among them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.progress import Progress, impossible
from megalite.model.fingerprint import fingerprint
from megalite.optim.file_pieces import copy
from megalite.optim.interface import Optimizer
from megalite.optim.states import local
from megalite.parallel.gradients import counts
from megalite.parallel.parameter import Parameter, box, cut, extra_state, parameters
from megalite.plan.parts.roles import EMBEDDING
from megalite_kernels.nf4 import quantize_nf4

COUNTS = ("step", "updates", "samples", "tokens", "bad_steps")  # fields of Progress that are whole numbers
FORMS = {  # tensors of Progress: dtype, number of dimensions, sizes of all but the first
    **dict.fromkeys(COUNTS, ("int64", 0, ())),
    "left_out": ("int64", 2, (2,)),
    "losses": ("float64", 1, ()),
}
MAX_ELEMENTS = 1 << 24  # elements of such a tensor
CPU = torch.device("cpu")
FilledPart = tuple[str, Tensor, Sequence[int]]  # name, the part to fill, and the place of its first element
STATE_PREFIX = "optimizer."  # begins the names of optimizer states
STEP_COUNT = "step"  # count of updates among an optimizer's states: it is a part of the progress


@dataclass(frozen=True)
class State:
    """The tensors that one rank trains."""

    stages: Mapping[int, nn.Module]  # by their number in the whole model
    optimizer: Optimizer | None = None  # None: only the weights matter
    adapted: bool = False  # adapters are trained, on some ranks at least
    trained_on: torch.device | None = None  # None: the device of the weights

    @property
    def device(self) -> torch.device:
        """Device of training, the same kind on all ranks, whether or not parameters live on the host."""
        if self.trained_on is not None:
            return self.trained_on
        return next((param.device for stage in self.stages.values() for param in stage.parameters()), CPU)

    def weights(self) -> dict[str, Tensor]:
        """Weights by global name, without gradients and padding, and extra state, which is there beside them."""
        extra = (each for stage in self.stages.values() for each in extra_state(stage))
        found: dict[str, Tensor] = {
            f"model.{name}": cut(first.value, first.shape) for name, (first, *_) in self._named().items()
        }
        return found | {f"model.{each.name}": cut(each.value, each.shape) for each in extra}

    def base(self) -> dict[str, tuple[int, ...]]:
        """All `weights` but the factors of adapters, which are trained beside them: the shapes of their values."""
        found = {name: tuple(weight.shape) for name, weight in self._plain().items()}
        return found | {f"model.{each.name}": each.values()[0] for each in self._in_four_bits()}

    @torch.no_grad()
    def fill_base(self, fill: Callable[[Sequence[FilledPart]], None]) -> dict[str, int]:
        """Have `fill` fill this rank's parts of the base, those in four bits one after another, in float32.

        Returns their numbers if there are adapters, see `model.fingerprint`: of parameters together, under the name "",
        each counted on one rank; and of extra state by its name, which all ranks that have it have whole.
        """
        fill([(name, *_part(tensor)) for name, tensor in self._plain().items()])
        found = self._numbers() if self.adapted else {"": 0}
        for each in self._in_four_bits():
            whole, sizes, first = each.values()
            values = torch.empty(sizes)
            fill([(f"model.{each.name}", values, first)])
            packed = each.value.to_local()
            values = values.to(packed.device)
            packed.copy_(quantize_nf4(values))
            found[""] += counts(each.value) and fingerprint(each.name, values, whole, first)
        return found

    def _plain(self) -> dict[str, Tensor]:
        """The base without weights in four bits."""
        others = self._factors() | {f"model.{each.name}" for each in self._in_four_bits()}
        return {name: weight for name, weight in self.weights().items() if name not in others}

    def _in_four_bits(self) -> list[Parameter]:
        return [first for first, *_ in self._named().values() if first.four_bits]

    def _numbers(self) -> dict[str, int]:
        found = {"": 0}
        for number, stage in self.stages.items():
            for each in parameters(stage):
                second_copy = each.role == EMBEDDING and number > 0
                if not each.role.adapts and not each.four_bits and not second_copy and counts(each.value):
                    found[""] += _number(each)
            found |= {each.name: _number(each) for each in extra_state(stage)}
        return found

    def held(self) -> dict[str, Tensor]:
        """The `weights` that checkpoints hold: all, or with adapters their factors alone."""
        if not self.adapted:
            return self.weights()
        factors = self._factors()
        return {name: weight for name, weight in self.weights().items() if name in factors}

    def tensors(self) -> dict[str, Tensor]:
        """Return what is `held` and optimizer states, which are made as zeros where there are none yet."""
        assert self.optimizer is not None
        tensors = self.held()
        for name, (first, *_) in self._named().items():
            if first.value.requires_grad:
                states = self.optimizer.states_of(first.value).items()
                tensors |= {
                    f"{STATE_PREFIX}{state}.{name}": cut(held, first.shape)
                    for state, held in states
                    if state != STEP_COUNT
                }
        return tensors

    @torch.no_grad()
    def loaded_weights(self) -> None:
        """Copy the weights, once they are filled, to copies that `weights()` does not list."""
        for first, *copies in self._named().values():
            for each in copies:
                each.value.copy_(first.value)

    def loaded(self, updates: int) -> None:
        """Fill what `tensors()` does not list, once what it lists is filled; `updates` were taken before."""
        assert self.optimizer is not None
        self.loaded_weights()
        for first, *copies in self._named().values():
            if not first.value.requires_grad:
                continue
            states = self.optimizer.states_of(first.value)
            if STEP_COUNT in states:
                states[STEP_COUNT].fill_(updates)
            for each in copies:
                others = self.optimizer.states_of(each.value)
                for name, tensor in states.items():
                    copy(local(tensor), local(others[name]))

    def _factors(self) -> set[str]:
        return {f"model.{name}" for name, (first, *_) in self._named().items() if first.role.adapts}

    def _named(self) -> dict[str, list[Parameter]]:
        """Parameters by global name: one of each, but for a tied embedding whose two copies are on this rank."""
        found: dict[str, list[Parameter]] = {}
        for stage in self.stages.values():
            for parameter in parameters(stage):
                found.setdefault(parameter.name, []).append(parameter)
        return found


def _part(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return the part of a DTensor on this rank, and the place of its first element."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local(), box(tensor)[1]


def is_state(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a state of the optimizer."""
    return name.startswith(STATE_PREFIX)


def _number(found: Parameter) -> int:
    part = cut(found.value, found.shape)
    return fingerprint(found.name, part.to_local(), found.shape, box(part)[1])


def progress_tensors(progress: Progress, learning_rate: float, seed: int) -> dict[str, Tensor]:
    """Return `progress` as tensors.

    The learning-rate schedule and all random numbers are pure functions of the step and the seed. The rate, of the
    latest step, is there for other programs.
    """
    return {
        **{f"progress.{name}": torch.tensor(getattr(progress, name)) for name in COUNTS},
        "progress.left_out": torch.tensor(progress.left_out, dtype=torch.int64).reshape(-1, 2),
        "progress.losses": torch.tensor(progress.losses, dtype=torch.float64),
        "schedule.learning_rate": torch.tensor(learning_rate, dtype=torch.float64),
        "rng.seed": torch.tensor(seed),
    }


def empty_progress(index: Index, more: Iterable[str] = ()) -> dict[str, Tensor]:
    """Tensors to load the progress of a checkpoint into, and `more` whole numbers. Raises ValueError if one is not
    there."""
    found = {}
    forms = {f"progress.{name}": form for name, form in FORMS.items()} | dict.fromkeys(more, FORMS["step"])
    for name, form in forms.items():
        stored = index.tensors.get(name)
        if (
            stored is None
            or (stored.dtype, len(stored.shape), stored.shape[1:]) != form
            or stored.elements > MAX_ELEMENTS
        ):
            raise ValueError(f"holds no {name} of {form[0]}")
        found[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    return found


def progress_from(tensors: Mapping[str, Tensor]) -> Progress:
    """The inverse of `progress_tensors`. Raises ValueError for what no run can have come to."""
    counts = {name: int(tensors[f"progress.{name}"]) for name in COUNTS}
    left_out = tuple((first, end) for first, end in tensors["progress.left_out"].tolist())
    losses = tuple(tensors["progress.losses"].tolist())
    progress = Progress(**counts, left_out=left_out, losses=losses)
    if problem := impossible(progress):
        raise ValueError(problem)
    return progress


def use_device(device: torch.device) -> None:
    """Make `device` the current GPU of this thread. A new thread has the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
