"""The bytes of a pipeline rank at their most, without what they are of: a search looks at hundreds of layouts."""

from collections.abc import Iterable

from megalite.plan.parts import Moment, Part
from megalite.plan.pipeline import as_full, fullest_steps
from megalite.plan.resolved import Plan
from megalite.plan.walk import HOST, Walk


class Total(Walk):
    """A walk that counts the bytes on the device alone, in half the time."""

    def most_bytes(self) -> int:
        """What `on_device` tells of `run`."""
        self.run()
        return self.most

    def _keep(self, part: Part) -> None:
        self.total += part.kept_bytes

    def _release(self, part: Part, moment: Moment, puts_off: bool) -> None:
        self.total += part.change[moment.name, puts_off]

    def _hold(self, kind: str, component: str, size: int) -> None:
        if kind != HOST:
            self.total += size

    def _see(self, temporaries: int = 0, gathered: int = 0, what: str = "") -> None:
        if self.total + temporaries + gathered > self.most and not self.passing:
            self.most = self.total + temporaries + gathered


def fullest(plan: Plan, ranks: Iterable[int]) -> int:
    """The bytes of `Memory.total` on the fullest of `ranks`; not for gpipe, whose steps are too long to be walked."""
    inputs, steps = plan.sizes.inputs, fullest_steps(plan.config)
    return max(Total(plan, as_full(plan.config, m), rank).most_bytes() + m * inputs for rank in ranks for m in steps)
