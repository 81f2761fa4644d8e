"""The planner's prediction of a step, as a run keeps it in its traces to be laid beside them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.predict import predict, seconds_of
from megalite.cost.schedule_tables import Cost
from megalite.cost.stages import Timer, transfer_seconds
from megalite.plan.resolved import Plan
from megalite.schedule.actions import COMPUTE, Times


@dataclass(frozen=True)
class Expected:
    """A predicted step. parts: as in `Prediction`. times: of the compute on every stage. transfer: of one message.

    All are seconds.
    """

    cluster: str
    seconds: float
    parts: Mapping[str, float]
    times: Times
    transfer: float

    @staticmethod
    def of(config: Config, cluster: Cluster, plan: Plan) -> "Expected":
        """The prediction for a run. Raises InputError as `predict` does."""
        timer = Timer(cluster)
        found = predict(config, cluster, timer, plan)
        times = tuple(
            tuple(seconds_of(Cost(kind, stage), found.stages) for kind in COMPUTE) for stage in range(plan.stages)
        )
        transfer = float(transfer_seconds(config, timer.net))
        return Expected(cluster.name, found.seconds, found.parts, times, transfer)  # type: ignore[arg-type]

    @staticmethod
    def read(about: Mapping[str, Any]) -> "Expected | None":
        """The prediction in the additions to a trace, if it has one. Raises KeyError and TypeError."""
        told = about.get("expected")
        if told is None:
            return None
        parts = {str(name): float(seconds) for name, seconds in told["parts"].items()}
        times = tuple((float(f), float(b), float(i), float(w)) for f, b, i, w in told["times"])
        return Expected(str(told["cluster"]), float(told["seconds"]), parts, times, float(told["transfer"]))

    def plain(self) -> dict[str, Any]:
        """The prediction as `read` takes it."""
        return {**asdict(self), "parts": dict(self.parts)}
