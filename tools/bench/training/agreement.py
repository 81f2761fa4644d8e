"""Checks that implementations compute the same losses at every step, and the same first gradients. Imports no torch.

Rows of one group have the same weights, tokens and settings. All others are compared with the
first row that is megalite's. A row that is too far from it disagrees, and no ratio is made of its times.
"""

import math
from collections.abc import Mapping, Sequence

from megalite_tools.bench.training.cases import MEGALITE
from megalite_tools.bench.training.rows import DISAGREEMENT, OK, Row

LOSS_TOLERANCE = 1e-2  # nats by which losses may differ: bf16 rounds activations and logits differently
NORM_TOLERANCE = 0.03  # share by which the norms of the first gradients may differ; AdamW would hide a factor
CURVE_TOLERANCE = 0.03  # share of the loss's fall by which later losses may differ, if that is more


def judged(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The same rows, each with the status that its losses give it."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows.values(), key=lambda row: row.get("written", 0)):
        if row["status"] in (OK, DISAGREEMENT) and row.get("group") and row.get("loss"):
            groups.setdefault(row["group"], []).append(row)
    found = dict(rows)
    for group in groups.values():
        ours = [row for row in group if row.get("implementation") == MEGALITE]
        for row in group:
            reason = _difference(ours[0], row) if ours else ""
            plain = {key: value for key, value in row.items() if key != "reason"}
            found[row["id"]] = (
                {**plain, "status": DISAGREEMENT, "reason": f"{reason} of {ours[0]['id']}"}
                if reason
                else {**plain, "status": OK}
            )
    return found


def _difference(ours: Row, row: Row) -> str:
    return apart(ours["loss"], row["loss"]) or _norms_apart(ours.get("grad_norm"), row.get("grad_norm"))


def _norms_apart(expected: Sequence[float] | None, got: Sequence[float] | None) -> str:
    if expected and got and not abs(got[0] - expected[0]) <= NORM_TOLERANCE * expected[0]:
        return f"the first gradients have the norm {got[0]:.4g}, not the {expected[0]:.4g}"
    return ""


def apart(expected: Sequence[float], got: Sequence[float]) -> str:
    """First difference of two loss curves that is larger than roundings make, as text; "" if there is none."""
    for step, (ours, theirs) in enumerate(zip(expected, got, strict=False), 1):
        allowed = max(LOSS_TOLERANCE, CURVE_TOLERANCE * (expected[0] - ours))
        if not (math.isfinite(theirs) and abs(ours - theirs) <= allowed):
            return f"the loss of step {step} is {theirs:.4f}, not the {ours:.4f}"
    return ""
