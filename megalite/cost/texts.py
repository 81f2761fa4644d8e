"""Predictions in words: steps, money, and what takes a step's time. Imports no torch."""

from megalite.config.schema import Config
from megalite.cost.predict import Prediction
from megalite.plan.automatic import OrderCosts
from megalite.plan.pipeline import pairs_up
from megalite_launch.base.texts import seconds_text

PARTS = {  # words for `Prediction.parts`
    "products": "matrix products",
    "attention": "attention",
    "passes": "passes over memory",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "experts": "tokens on their way to experts and back",
    "data": "data-parallel communication, exposed",
    "bubble": "waiting for other pipeline stages",
    "host": "waiting for the host's launches",
    "offload": "copies to and from host memory",
    "optimizer": "optimizer",
    "slowest": "waiting for the slowest GPU",
}


def step_text(prediction: Prediction) -> str:
    """The time of a step with its interval."""
    middle = prediction.seconds
    low, high = seconds_text(prediction.low, middle), seconds_text(prediction.high, middle)
    return f"{seconds_text(middle)} ({low} – {high})"


def turns_text(prediction: Prediction) -> str:
    """Text on what passes of the busiest pipeline rank save by taking turns; "" where none do."""
    if not pairs_up(prediction.config):
        return ""
    rank = prediction.busy.index(max(prediction.busy))
    one, other = (prediction.stages[stage] for stage in prediction.plan.stages_of(rank))
    turns = one.beside(other).total + other.beside(one).total
    alone = one.forward.total + one.backward.total + other.forward.total + other.backward.total
    return (
        f"A forward of one stage and a backward pass of the rank's other stage take turns: while rows of one are on "
        f"their way, the other computes. Both passes of both stages take {seconds_text(turns)} so on pipeline rank "
        f"{rank}, and {seconds_text(alone)} one after the other (parallel.pipeline.overlap=false)."
    )


def searched_text(config: Config, costs: OrderCosts) -> str:
    """Text on the times of stages, and the activations on a rank, for which `schedule: auto` is searched."""
    cluster, memory = costs.cluster, config.parallel.pipeline.memory
    times = "the time of their FLOPs" if cluster is None else f"the time that is predicted on {cluster}"
    if memory is not None:
        held = f"a rank may hold {memory:g} GiB of activations"
    elif costs.room is not None:
        room = "its GPU has room for" if config.batch.memory is None else "batch.memory has room for"
        held = f"a rank may hold the activations that {room}"
    else:
        held = "a rank may hold as many activations as the fullest one of 1f1b"
        if cluster is not None and config.train.recompute != "budget":
            held += ", since no order is known to fit the GPU"
    return f"stages take {times}, and {held}"


def money(dollars: float) -> str:
    """`$1,234`, `$12.34 M`, `$1.20 B`, or `under $0.01`."""
    if dollars < 0.01:
        return "under $0.01" if dollars else "$0"
    if dollars >= 999.995e6:
        return f"${dollars / 1e9:,.2f} B"
    return f"${dollars / 1e6:,.2f} M" if dollars >= 1e6 else f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"
