"""The states that an optimizer keeps of every parameter."""

from megalite.config.schema import Optim
from megalite.plan.model.roles import Role, RoleKind

ADAMW_STATES = ("exp_avg", "exp_avg_sq")
MUON_STATES = ("momentum_buffer",)


def state_names(optim: Optim, role: Role) -> tuple[str, ...]:
    """The states that the optimizer keeps of a parameter, by PyTorch's names.

    Each state has the size, the placement and the data type of its parameter.
    """
    return MUON_STATES if uses_muon(optim, role) else ADAMW_STATES


def uses_muon(optim: Optim, role: Role) -> bool:
    """Return whether Muon updates a parameter: a matrix inside of a layer. AdamW updates the others."""
    return optim.name == "muon" and role.kind is RoleKind.MATRIX


def host_copies(optim: Optim, role: Role) -> int:
    """Number of copies of a parameter's size that are kept in host memory beside states there.

    AdamW updates copies of the weight and its gradient where the states are. Muon's products need the device, which its
    states visit instead.
    """
    return 0 if optim.place == "device" or uses_muon(optim, role) else 2
