"""Bytes that context parallelism moves."""

from math import lcm

from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.window import halo


def bytes_sent(config: Config, window: int | None = None) -> tuple[int, int]:
    """The bytes that one rank sends for the attention of a layer and a micro-batch: in forward, and in backward.

    Keys and values are sent in the compute precision, in forward and again in backward. In backward their gradients
    follow, which are summed in float32 or wider. Ulysses exchanges positions for heads before attention, and heads for
    positions after it, in forward and in backward. With a `window` the ranks send unequal amounts; the largest are
    returned.
    """
    model, parallel, sizes = config.model, config.parallel, Activations(config)
    cp, heads, kv_heads = parallel.cp, model.heads // parallel.tp, model.kv_heads // parallel.tp
    if parallel.context.method == "ulysses":
        moved = sizes.tokens * model.head_size * 2 * (heads + lcm(kv_heads, cp)) * sizes.w
        return moved * (cp - 1) // cp, moved * (cp - 1) // cp
    position = sizes.tokens * cp // model.sequence_length * model.head_size * 2 * kv_heads  # elements per position
    if window is None or window >= model.sequence_length:
        numbers = (cp - 1) * model.sequence_length // cp * position
        return numbers * sizes.w, numbers * (sizes.w + sizes.z)
    moved_by = [halo(cp, rank, model.sequence_length, window) for rank in range(cp)]
    forward = max(given for given, _ in moved_by) * sizes.w
    return forward * position, max(given * sizes.w + taken * sizes.z for given, taken in moved_by) * position
