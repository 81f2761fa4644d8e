"""Bytes of gradients of weights while they are made and added up, before FSDP2 reduces them."""

from megalite.plan.memory.held import Held, PartKey
from megalite.plan.parts.part import Moment
from megalite.plan.resolved import Plan


class GradientSums(Held):
    """Bytes held on a pipeline rank, among them gradients of parts, which several micro-batches add up."""

    def __init__(self, plan: Plan, m: int, pp: int) -> None:
        super().__init__(plan, m, pp)
        self.whole: set[PartKey] = set()  # parts with gradients that are not reduced yet

    def _adds_at_once(self, key: PartKey, widens: bool) -> bool:
        """Return whether new gradients are added at once to those held; if FSDP2 widens gradients, it adds later.

        widens: autograd makes all gradients as wide as FSDP2 sums them.
        """
        states = self.states
        if states.copies or (widens and states.r != states.w):
            return True
        return key in self.whole and (not states.managed or states.r == states.w or states.of_2_15)

    def _made(self, key: PartKey, moment: Moment, adds_at_once: bool) -> int:
        """Bytes of new gradients of weights beside their sums: PyTorch's products add to sums of weights with copies.

        Products in 8 bits write float32, but with a scale for every row: the first gradients are the sums, others are
        added to them.
        """
        train, states = self.config.train, self.states
        if states.copies and moment.summed is not None:
            return moment.summed
        rounds = moment.name == "lookup" or train.product != "plain" or train.compile
        if not states.copies or rounds or (train.precision == "fp8" and train.float8_recipe == "rowwise"):
            return (moment.largest if adds_at_once else 0) or moment.weights
        return moment.weights * states.r // states.w if train.precision == "fp8" and key in self.whole else 0

    def _new_sums(self, key: PartKey, moment: Moment, widens: bool) -> int:
        """Bytes of sums that first gradients begin: those of weights with copies, and those that autograd `widens`."""
        begins = self.states.copies or (widens and self.states.r != self.states.w)
        return moment.weights * self.states.r // self.states.w if begins and key not in self.whole else 0
