"""A sentence about collectives of tensor parallelism beside matrix products, for people. Imports no torch."""

from megalite.config.schema import Config

SUBJECT = "collectives of tensor parallelism"


def overlap_text(config: Config, reason: str | None = None, on_cpu: bool = False) -> str:
    """Say what becomes of `parallel.tensor.overlap`; "" where nothing but pieces is asked for.

    reason: why a run does not fuse them, "" where it does; None: no GPU was asked. on_cpu: the run is on CPUs.
    """
    asked = config.parallel.tensor.overlap
    if config.parallel.tp == 1 or asked == "pieces":
        return ""
    if not config.plain_products:
        reason = "no others than PyTorch's own products can be fused with them"
    elif config.train.cuda_graph:
        reason = "operations on symmetric memory are not captured by train.cuda_graph"
    elif on_cpu:
        reason = "a CPU has no symmetric memory" if asked == "auto" else ""
    if reason:
        return f"{SUBJECT} run as with parallel.tensor.overlap = pieces, since {reason}"
    fused = f"{SUBJECT} are fused with matrix products, through symmetric memory"
    if on_cpu:
        return f"{SUBJECT} run before or after matrix products, as PyTorch stands in for symmetric memory on a CPU"
    if reason == "":
        return fused
    otherwise = "they run as with pieces" if asked == "auto" else "a run ends"
    needs = "if the GPUs of a tensor-parallel group are in one node and read each other's memory, which a run tries"
    return f"{fused}, {needs}; else {otherwise}"
