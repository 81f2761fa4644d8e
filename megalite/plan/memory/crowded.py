"""The memory of a rank to whose experts all tokens go. Imports no torch."""

from megalite.config.schema import Config
from megalite.plan.memory.peak import Memory

ROW_KINDS = ("activations", "temporaries")  # kinds of memory that rows of tokens take


def crowded(config: Config, memory: Memory) -> int:
    """Bytes at most of a rank that needs `memory` where experts are chosen equally often: if every token of the ranks
    that share out experts chooses as many of this one's as it can. All of a layer with experts is counted as rows.
    Buffers of a fixed size have room for them anyway."""
    experts, ep = config.model.experts, config.parallel.ep
    if experts is None or ep == 1 or config.parallel.fixed_buffers:
        return memory.total
    times = ep * min(experts.active, experts.count // ep) / experts.active
    rows = sum(memory.of(kind).get("mlp", 0) for kind in ROW_KINDS)
    return memory.total + round((times - 1) * rows)
