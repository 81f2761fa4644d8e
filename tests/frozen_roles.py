"""A toy for weights that are not trained: those of some roles are described so, as the base of adapters would be."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from toy_jobs import MODEL

from megalite.plan.model.weights import weights
from megalite.plan.parts import roles
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import Role

EVERY = frozenset(weight.role for weight in weights(MODEL).values())
BASE = EVERY - {roles.QUERY, roles.VALUE}  # two matrices of a layer are left
SOME = frozenset([roles.QUERY, roles.DOWN_PROJECTION, roles.KEY.bias, roles.NORM])  # of every kind, beside trained ones
INPUTS = frozenset([roles.QUERY, roles.KEY, roles.GATE])  # all matrices that take what tensor parallelism gathers
ENDS = frozenset([roles.EMBEDDING, roles.HEAD, roles.FINAL_NORM])


@contextmanager
def frozen(those: frozenset[Role]) -> Iterator[None]:
    """Weights of these roles are not trained."""
    made = Weight.__init__

    def described(weight: Weight, shape: tuple[int, ...], role: Role, trained: bool = True) -> None:
        made(weight, shape, role, trained and role not in those)

    with patch.object(Weight, "__init__", described):
        yield
