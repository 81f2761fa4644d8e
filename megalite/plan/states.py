"""What an optimizer keeps of every parameter."""

from megalite.config.schema import Optim
from megalite.plan.roles import Role

ADAMW = ("exp_avg", "exp_avg_sq")


def state_names(optim: Optim, role: Role) -> tuple[str, ...]:
    """The states that the optimizer keeps of a parameter, by PyTorch's names.

    Each has the size, the place and the data type of the parameter.
    """
    match optim.name:
        case "adamw":
            return ADAMW
