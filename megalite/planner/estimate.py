"""The memory of a layout, estimated without its schedule. Imports no torch."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megalite.config.layers import LayerKind
from megalite.config.schema import Config
from megalite.plan.activations import BYTES, Activations
from megalite.plan.size import layer_parameters
from megalite.planner.choice import Choice, mode_of

ALIKE = 0.95  # of the bytes beside states: siblings that a layout differs from have at least as many


class Estimate:
    """Bytes of the layouts of `config`, with what walks through schedules have taught.

    pins: keys that keep their values. kinds: of layers, each with how many there are.
    """

    def __init__(self, config: Config, pins: Mapping[str, Any], kinds: Mapping[LayerKind, int]) -> None:
        self.config, self.pins, self.kinds = config, pins, kinds
        self.layer_parameters = {kind: layer_parameters(config.model, kind).total for kind in kinds}
        self._known: dict[tuple[int, int, int, str], Activations] = {}
        self._keep: dict[tuple[object, ...], int] = {}
        self._learned: dict[Choice, float] = {}

    def memory(self, choice: Choice) -> float:
        """Bytes of the fullest rank, estimated: states, gathered weights, gradients, activations in flight.

        A walk through the schedule finds up to a third more, and not less. `learn` makes the estimate closer.
        """
        states, gradients = self._states_of(choice), self._gradients(choice)
        if beside := self._learned.get(_beside(choice)):
            return states + gradients + beside
        flying = self._flying(choice)
        if self._micro_batches(choice) > choice.pp and choice.schedule != "gpipe":
            return states + gradients + flying
        return states + max(gradients, flying)  # gradients come as activations go

    def learn(self, choice: Choice, walked: float) -> None:
        """Remember what a walk through the schedule of a layout found.

        It holds for all that differ from it in nothing but how states are shared out over ranks.
        """
        known = self._states_of(choice) + self._gradients(choice)
        self._learned.setdefault(_beside(choice), ALIKE * (walked - known))

    def _flying(self, choice: Choice) -> float:
        """Bytes of the activations that the first pipeline rank keeps; and alone, of the output layer's."""
        if choice.offload_activations:
            return 0.0
        m = self._micro_batches(choice)
        flying = min(m, choice.pp) if choice.schedule != "gpipe" else m
        if choice.schedule == "zb_h2":
            flying = min(m, 2 * choice.pp - 1)
        layers = self.config.model.layers
        each = self._kept(choice) * min(1 / choice.pp, layers // choice.pp / layers) * flying
        if choice.schedule == "interleaved_1f1b" and choice.pp > 1:
            virtual = choice.virtual or 2
            first = layers // (choice.pp * virtual) * virtual / layers  # of all layers, those on the first rank
            each = self._kept(choice) * first * flying
            each *= min(1 + (choice.pp - 1) / (choice.pp * virtual), m / flying)
        return each + (self.sizes(choice).outside(1)[0] if choice.pp == 1 else 0)

    def _micro_batches(self, choice: Choice) -> int:
        return self.config.batch.global_ // (choice.replicas * choice.shards * choice.micro)

    def _states_of(self, choice: Choice) -> float:
        """Bytes of parameters, optimizer states and gathered weights."""
        held, shards = self._held(choice)
        element = BYTES[self.config.train.precision]
        wide = max(element, 4)
        needed = (1 if choice.offload_optimizer else 1 + self._states) * wide * held / shards
        if choice.mode != "zero3" and self.config.train.precision == "bf16":
            needed += element * held
        return needed

    def _gradients(self, choice: Choice) -> float:
        """Bytes of the gradients of a step."""
        held, shards = self._held(choice)
        wide = max(BYTES[self.config.train.precision], 4)
        return wide * held / (shards if choice.mode in ("zero2", "zero3") else 1)

    def _held(self, choice: Choice) -> tuple[float, int]:
        """Parameters of a pipeline rank before they are sharded, and over how many ranks they are."""
        parameters = sum(self.layer_parameters[kind] * count for kind, count in self.kinds.items())
        held = (parameters + self.config.model.vocab_size * self.config.model.width) / choice.pp / choice.tp
        return held, choice.shards * choice.cp if choice.mode != "ddp" else 1

    def _kept(self, choice: Choice) -> float:
        """Bytes that all layers keep of a micro-batch."""
        mode = "full" if choice.recompute == "budget" else mode_of(choice)
        key = choice.tp, choice.cp, choice.micro, choice.method, mode
        if key not in self._keep:
            sizes = self.sizes(choice)
            self._keep[key] = sum(sizes.layer_bytes(kind, mode) * count for kind, count in self.kinds.items())
        return self._keep[key]

    @cached_property
    def _states(self) -> int:
        return 2 if self.config.optim.name == "adamw" else 1

    def sizes(self, choice: Choice) -> Activations:
        """Sizes of a layout's activations."""
        key = choice.tp, choice.cp, choice.micro, choice.method
        if key not in self._known:
            self._known[key] = Activations(choice.applied(self.config, self.pins))
        return self._known[key]


def _beside(choice: Choice) -> Choice:
    """What the bytes beside a layout's states depend on, in a choice of its own."""
    return choice._replace(mode="zero1", replicas=1, shards=choice.replicas * choice.shards)
