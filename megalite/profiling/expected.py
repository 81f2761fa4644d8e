"""The planner's prediction of a step, as a run keeps it in its traces to be laid beside them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalite.base.json_shape import TEXT, Each, ValueKind
from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.predict import predict
from megalite.cost.rank_seconds import seconds_of
from megalite.cost.schedule_tables import Cost
from megalite.cost.stages import Timer, transfer_seconds
from megalite.plan.resolved import Plan
from megalite.schedule.actions import COMPUTE, Times

MAX_SECONDS = 1e9


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS


TIME = ValueKind(f"seconds from 0 to {MAX_SECONDS:g}", _is_time)
TIMES = ValueKind(
    f"{len(COMPUTE)} times, each {TIME.text}",
    lambda value: isinstance(value, list) and len(value) == len(COMPUTE) and all(map(_is_time, value)),
)
SHAPE = {"cluster": TEXT, "seconds": TIME, "parts": Each(TIME), "times": [TIMES], "transfer": TIME}  # see `plain`


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
    def read(told: Mapping[str, Any]) -> "Expected":
        """The prediction as `plain` has made it, which is of SHAPE."""
        times = tuple((f, b, i, w) for f, b, i, w in told["times"])
        return Expected(told["cluster"], told["seconds"], told["parts"], times, told["transfer"])

    def plain(self) -> dict[str, Any]:
        """The prediction as `read` takes it."""
        return {**asdict(self), "parts": dict(self.parts)}
