"""The states that an optimizer keeps of every parameter."""

from megalite.config.schema import Optim
from megalite.plan.model.roles import Kind, Role
from megalite.plan.parts.part import Weight

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
    return optim.name == "muon" and role.kind is Kind.MATRIX
