"""The interface of optimizers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Optimizer(Protocol):
    """Updates a rank's parameters. Has PyTorch's parameter groups; `set_rate` sets their `lr` before every step.

    clip, found_inf: tensors on the device, set before a step, so that the host does not wait for the device. Gradients
    are multiplied by `clip`, 0-dimensional. If `found_inf`, float32, is not 0, the step changes nothing.
    """

    param_groups: list[dict[str, Any]]
    clip: Tensor | None
    found_inf: Tensor | None

    def step(self) -> None:
        """Update every parameter that has a gradient. May be collective over the ranks of a pipeline stage."""

    def zero_grad(self) -> None:
        """Free the gradients."""

    def states_of(self, param: Any) -> dict[str, Tensor]:
        """The states of a parameter, those of `plan.states`, with its placement. Missing states are created as zeros.

        They may include `step`, the number of updates.
        """

    def buffers(self) -> Sequence[Tensor]:
        """Tensors other than states that the optimizer keeps from step to step."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Have `hook` called before every step."""

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Have `hook` called after every step."""


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Let the next step have the learning rate `rate`, which every parameter group multiplies by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["rate"], group["lr"] = rate, rate * group["lr_scale"]


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate of the latest step, before any group multiplied it."""
    return float(optimizer.param_groups[0]["rate"])
