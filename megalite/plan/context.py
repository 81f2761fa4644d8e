"""Bytes that context parallelism moves."""

from math import lcm

from megalite.config.schema import Config
from megalite.plan.activations import Activations


def bytes_sent(config: Config) -> tuple[int, int]:
    """What one rank sends to others for the attention of a layer and a micro-batch: in forward, and in backward.

    Keys and values travel in the compute precision, and in backward again, followed by their gradients, which are
    summed in float32 or wider. Ulysses sends heads for positions and gets them back, both ways.
    """
    model, parallel, sizes = config.model, config.parallel, Activations(config)
    cp, heads, kv_heads = parallel.cp, model.heads // parallel.tp, model.kv_heads // parallel.tp
    if parallel.context.method == "ulysses":
        moved = sizes.tokens * model.head_size * 2 * (heads + lcm(kv_heads, cp)) * sizes.w
        return moved * (cp - 1) // cp, moved * (cp - 1) // cp
    numbers = (cp - 1) * sizes.tokens * model.head_size * 2 * kv_heads
    return numbers * sizes.w, numbers * (sizes.w + sizes.z)
