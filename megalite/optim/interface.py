"""What the rest of the package asks of an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Optimizer(Protocol):
    """Updates a rank's parameters. Has PyTorch's parameter groups; their `lr` is set before every step.

    clip, found_inf: set before a step, on the device, so that nobody waits for it. Gradients are multiplied by `clip`,
    0-dimensional; where `found_inf`, float32, is not 0, the step changes nothing.
    """

    param_groups: list[dict[str, Any]]
    clip: Tensor | None
    found_inf: Tensor | None

    def step(self) -> None:
        """Update every parameter that has a gradient. May be collective over the ranks of a pipeline stage."""

    def zero_grad(self) -> None:
        """Free the gradients."""

    def states_of(self, param: Any) -> dict[str, Tensor]:
        """The states of a parameter, made as zeros where there are none: those of `plan.states`, placed as it is.

        Beside them `step` may count the updates.
        """

    def buffers(self) -> Sequence[Tensor]:
        """What it keeps from step to step beside states."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Have `hook` called before every step."""
