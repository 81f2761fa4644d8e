"""Bytes that context parallelism moves."""

from math import lcm

from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.window import halo


def bytes_sent(config: Config, window: int | None = None) -> tuple[int, int]:
    """What one rank sends to others for the attention of a layer and a micro-batch: in forward, and in backward.

    Keys and values travel in the compute precision, and in backward again, followed by their gradients, which are
    summed in float32 or wider. Ulysses sends heads for positions and gets them back, both ways. With a `window` the
    ranks send unequal amounts; these are the largest.
    """
    model, parallel, sizes = config.model, config.parallel, Activations(config)
    cp, heads, kv_heads = parallel.cp, model.heads // parallel.tp, model.kv_heads // parallel.tp
    if parallel.context.method == "ulysses":
        moved = sizes.tokens * model.head_size * 2 * (heads + lcm(kv_heads, cp)) * sizes.w
        return moved * (cp - 1) // cp, moved * (cp - 1) // cp
    position = sizes.tokens * cp // model.sequence_length * model.head_size * 2 * kv_heads  # keys and values of one
    if window is None or window >= model.sequence_length:
        numbers = (cp - 1) * model.sequence_length // cp * position
        return numbers * sizes.w, numbers * (sizes.w + sizes.z)
    moved_by = [halo(cp, rank, model.sequence_length, window) for rank in range(cp)]
    forward = max(given for given, _ in moved_by) * sizes.w
    return forward * position, max(given * sizes.w + taken * sizes.z for given, taken in moved_by) * position
