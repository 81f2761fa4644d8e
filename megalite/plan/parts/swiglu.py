"""SwiGLU, as plans know it. Its module is `megalite.model.mlp`.

    f  hidden width    h  width of the residual stream    t  tp    T  tokens on a rank    w  bytes of an activation

Kept are gate, up and their product, 3fwT/t; where norms are before the parts of a layer, the norm's output hwT/t, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megalite.config.layers import SwiGLU
from megalite.config.model_schema import BaseForm
from megalite.plan.parts import roles
from megalite.plan.parts.gathered import Gathered
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight
from megalite.plan.parts.sizes import Sizes


@dataclass(frozen=True)
class SwiGLUPart(Gathered):
    """The feed-forward of a layer of the residual stream's `width`."""

    width: int
    kind: SwiGLU
    base: BaseForm | None = None

    name, title = "mlp", "MLP"
    takes = "gate and up"
    moments = MappingProxyType({"gate": takes, "up": takes, "down": "down"})
    heads = None

    def described(self) -> Iterator[tuple[str, Weight]]:
        hidden = self.kind.width
        yield "gate.weight", Weight((hidden, self.width), roles.GATE)
        yield "up.weight", Weight((hidden, self.width), roles.UP_PROJECTION)
        yield "down.weight", Weight((self.width, hidden), roles.DOWN_PROJECTION)

    def products(self, tokens: float, tp: int) -> list[Product]:
        hidden = self.kind.width / tp
        return [
            Product(tokens, 2 * hidden, self.width, gathered=self.width),
            Product(tokens, self.width, hidden, scattered=True),
        ]

    def passed(self, tp: int) -> Passed:
        return Passed(hidden=2 * self.kind.width / tp)

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        f = sizes.split(self.kind.width)
        gate = up = Kept("mlp", f, "swiglu")
        if sizes.in_8_bits(self.weights(), into_stream=True):
            return gate, up, Kept("mlp", sizes.narrow(f, sizes.tokens), "down", for_weights="down")
        return gate, up, Kept("mlp", f, "down", for_weights="down", cheap=True)

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        gate_and_up = sum(kept.bytes for kept in passing if kept.until == "swiglu")  # freed before `down`
        others = sum(kept.bytes for kept in passing) - gate_and_up
        return max(sizes.gathered + max(gate_and_up, others), gate_and_up + others)

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        return ()

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        f, gathered = sizes.split(self.kind.width), sizes.gathered
        columns, into = self.casts(sizes, 2 * f, f)
        gate, up, down = (sizes.w * weight.gradient(sizes.t) for _, weight in self.weights())
        put_off = f * ((gate > 0) + (up > 0))
        taken = sizes.linear(2 * f, self.trains_columns) + columns
        return (
            Moment(
                "down",
                max(own, gathered) + f + into,
                down,
                put_off=gathered or sizes.stream,
                of_stream=not (own or gathered or into),
            ),
            Moment("swiglu", 3 * f),
            Moment("gate and up", taken, gate + up, max(gate, up), put_off=put_off, again=gathered),
        )
