"""Predictions in words: seconds, money, and what takes a step's time. Imports no torch."""

from megalite.planner.goodput import DAY
from megalite.planner.predict import Prediction
from megalite_launch.words import scaled

PARTS = {  # of `Prediction.parts`, in words
    "products": "matrix products",
    "attention": "attention",
    "passes": "passes over memory",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "data": "data-parallel communication, exposed",
    "bubble": "waiting for other pipeline stages",
    "host": "waiting for the host's launches",
    "offload": "copies to and from host memory",
    "optimizer": "optimizer",
}


def seconds_text(seconds: float, beside: float | None = None) -> str:
    """`1.23 s`, `45.6 ms`, or hours and days where `seconds`, or those that stand beside them, are as long."""
    length = seconds if beside is None else beside
    if length >= 2 * DAY:
        return f"{seconds / DAY:,.1f} days"
    if length >= 7200:
        return f"{seconds / 3600:.1f} hours"
    return scaled(float(seconds), "s") if seconds >= 1 else f"{seconds * 1e3:#.3g}".rstrip(".") + " ms"


def step_text(prediction: Prediction) -> str:
    """The time of a step with its interval."""
    middle = prediction.seconds
    low, high = seconds_text(prediction.low, middle), seconds_text(prediction.high, middle)
    return f"{seconds_text(middle)} ({low} – {high})"


def times_text(cluster: str | None) -> str:
    """What times `schedule: auto` is searched for: of `plan.automatic.OrderCosts`, the cluster."""
    return "the time of their FLOPs" if cluster is None else f"the time that is predicted on {cluster}"


def money(dollars: float) -> str:
    """`$1,234`, or `$12.3 M`."""
    return f"${dollars / 1e6:,.2f} M" if dollars >= 1e6 else f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"
