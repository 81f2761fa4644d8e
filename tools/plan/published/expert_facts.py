"""Two facts about layers with experts that published step times tell: what hosts take to launch them, and the rate of
PyTorch's grouped products. Imports no torch.

All other constants are those of rows without experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.program import Program
from megalite_tools.plan.published.fit import loss
from megalite_tools.plan.published.profiles import TORCH_GROUPED
from megalite_tools.plan.published.rows import Row
from megalite_tools.plan.published.score import Compared, timed

FACTORS = [2 ** (step / 8) for step in range(-16, 17)]  # times what stands: values that are tried


class Facts(NamedTuple):
    """host: seconds for a layer's forward pass, beyond those of one without experts. grouped: rate of PyTorch's grouped
    products and the functions around them, relative to that of Transformer Engine's."""

    host: float = Program.experts_host
    grouped: float = TORCH_GROUPED


STANDING = Facts()


def with_facts(rows: Sequence[Row], facts: Facts) -> list[Row]:
    """The rows, with these facts of their programs. CUDA graphs leave the same share of the host's time."""
    return [
        replace(
            row,
            program=replace(
                row.program,
                experts_host=row.program.experts_host * facts.host / STANDING.host,
                grouped=facts.grouped if _is_torch(row) else row.program.grouped,
            ),
        )
        for row in rows
    ]


def fitted(rows: Sequence[Row]) -> Facts:
    """Facts with the least loss on rows with experts: first the host's, of programs that are known."""
    torch, fused = [row for row in rows if _is_torch(row)], [row for row in rows if row.program.known]
    facts = STANDING
    if fused:
        hosts = (facts._replace(host=factor * STANDING.host) for factor in FACTORS)
        facts = min(hosts, key=lambda tried: loss(with_facts(fused, tried), FITTED_CONSTANTS))
    if torch:
        rates = (facts._replace(grouped=min(1.0, factor * STANDING.grouped)) for factor in FACTORS)
        facts = min(rates, key=lambda tried: loss(with_facts(torch, tried), FITTED_CONSTANTS))
    return facts


def without_own_source(rows: Sequence[Row]) -> list[Compared]:
    """Step times of every source, with facts that were fitted on all others."""
    found: list[Compared] = []
    for source in sorted({row.source for row in rows}):
        facts = fitted([row for row in rows if row.source != source])
        found += timed(with_facts([row for row in rows if row.source == source], facts))
    return found


def _is_torch(row: Row) -> bool:
    return row.program.grouped < 1
