"""The states that an optimizer keeps of every parameter."""

from megalite.config.schema import Optim
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import Role, RoleKind

ADAMW_STATES = ("exp_avg", "exp_avg_sq")
MUON_STATES = ("momentum_buffer",)


def state_names(optim: Optim, weight: Weight) -> tuple[str, ...]:
    """The states that the optimizer keeps of a parameter, by PyTorch's names: none if it is not trained.

    Each state has the size, the placement and the data type of its parameter.
    """
    if not weight.trained:
        return ()
    return MUON_STATES if uses_muon(optim, weight.role) else ADAMW_STATES


def uses_muon(optim: Optim, role: Role) -> bool:
    """Return whether Muon updates a parameter: a matrix inside of a layer. AdamW updates the others."""
    return optim.name == "muon" and role.kind is RoleKind.MATRIX


def host_copies(optim: Optim, weight: Weight) -> int:
    """Number of copies of a parameter's size on the device that are kept in host memory beside states there.

    AdamW updates copies of a trained weight and its gradient where the states are. Muon's products need the device,
    which its states visit instead.
    """
    on_host = optim.update_on == "host" and weight.trained and not uses_muon(optim, weight.role)
    return 2 if on_host else 0
