"""Section of `megalite show` about parametrizations: what is multiplied, for every kind of parameter."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from megalite.base.errors import listing
from megalite.base.terminal import table
from megalite.config.model_schema import Model
from megalite.config.parametrization import Multipliers, depth_ratio, multipliers, width_ratio
from megalite.config.schema import Config
from megalite.plan.model.optimizer_states import uses_muon
from megalite.plan.model.parametrization import scales, standard_deviation
from megalite.plan.model.weights import weights
from megalite.plan.parts.roles import Role, RoleKind


def parametrization(config: Config) -> Iterator[tuple[str, RenderableType]]:
    """A heading and what comes under it; nothing where no factor could differ from 1."""
    model = config.model
    if model.parametrization == "standard" and multipliers(model) == Multipliers():
        return
    yield f"Parametrization: {_title(model)}", Group(_roles(config), Text(_forward(model)))


def _title(model: Model) -> str:
    if model.parametrization == "standard" or model.base is None:
        return model.parametrization
    told = f"{model.parametrization}, {width_ratio(model):g}× as wide as the base of {model.base.width}"
    if model.parametrization == "completep":
        told += f", and {depth_ratio(model):g}× as deep as its {model.base.layers} layers"
    return told


def _roles(config: Config) -> RenderableType:
    model, optim = config.model, config.optim
    shown = table("parameters", "initial std", "learning rate", "weight decay", "eps", text=("parameters",))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, weight in weights(model).items():
        role = weight.role
        found = scales(model, optim, role)
        numbers = f"{optim.lr * found.lr:.4g}", f"{found.weight_decay:.4g}"
        eps = "Muon" if uses_muon(optim, role) else f"{found.eps:.4g}"
        names = rows.setdefault((_initial(model, role), *numbers, eps), [])
        kind = _kind(name, role)
        if kind not in names:
            names.append(kind)
    for values, names in rows.items():
        shown.add_row(listing(names, "and"), *values)
    return shown


def _initial(model: Model, role: Role) -> str:
    if role.kind is RoleKind.NORM:
        return "all 1" if model.norm_gain == "weight" else "all 0"
    return "all 0" if role.kind in (RoleKind.BIAS, RoleKind.MAGNITUDE) else f"{standard_deviation(model, role):.4g}"


def _kind(name: str, role: Role) -> str:
    """A name for the parameters of a role, as in all layers."""
    match role.kind:
        case RoleKind.MATRIX:
            return name.split(".")[-2]
        case RoleKind.NORM:
            return "norms" if role.in_layer else "the final norm"
        case RoleKind.BIAS:
            return "biases"
        case _:
            return role.kind.value


def _forward(model: Model) -> str:
    found = multipliers(model)
    scores = model.head_size**-0.5 if found.scores is None else found.scores
    return (
        f"The embedding's output is multiplied by {found.embedding:.4g}, scores by {scores:.4g}, what attention and "
        f"MLP add to the residual stream by {found.branch:.4g}, and logits by {found.logits:.4g}."
    )
