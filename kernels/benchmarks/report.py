"""Summary of the measured rows: bandwidths, ratios, whether targets are met; as data, and as a page of Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Protocol

from megalite_kernels.benchmarks.cases import WHOLE_PASS
from megalite_kernels.benchmarks.measure import NO_SUCH_KERNEL, Row
from megalite_kernels.benchmarks.timing import Spread
from megalite_kernels.benchmarks.variants import EAGER_TORCH, LIGER, MATMULS, MEGALITE, TORCH_COMPILE
from megalite_launch.base.texts import markdown_table

SHARES = {  # targets: least share of the bandwidth of a copy
    ("rms_norm", "forward"): 0.90,
    ("rms_norm", "backward"): 0.80,
    ("add_rms_norm", "forward"): 0.90,
    ("add_rms_norm", "backward"): 0.80,
    ("cross_entropy", WHOLE_PASS): 0.85,
    ("swiglu", "forward"): 0.90,
    ("swiglu", "backward"): 0.85,
    ("rope", "forward"): 0.85,
    ("rope", "backward"): 0.85,
    ("adamw", WHOLE_PASS): 0.85,
    ("muon", WHOLE_PASS): 0.85,
}
MAX_MATMUL_RATIO = 1.05  # times the time of the matrix products alone, at most
OTHER_KINDS = (TORCH_COMPILE, LIGER, EAGER_TORCH, MATMULS)
MET_TARGET, MISSED_TARGET, UNMEASURED_TARGET = "met", "missed", "not measured"


@dataclass(frozen=True)
class Summary:
    """One part of one op: these kernels beside the fastest implementation of every other kind.

    share: of the bandwidth of a copy. ratios: of their time to that of others. targets: whether each is met.
    """

    row: Row
    share: float | None
    ratios: dict[str, float]
    targets: dict[str, str]


class Timed(Protocol):
    """A measured row of any kind."""

    @property
    def seconds(self) -> Spread | None: ...
    @property
    def moved_bytes(self) -> int | None: ...


def median(row: Timed) -> float:
    """The median of a row's seconds; infinite for a row without times."""
    return inf if row.seconds is None else row.seconds.median


def share_of_copy(row: Timed, copy: float) -> float | None:
    """Return the row's bytes per second, counting only bytes that must be moved, as a share of `copy`, a copy's."""
    return row.moved_bytes / row.seconds.median / copy if row.moved_bytes and row.seconds else None


def summaries(rows: Sequence[Row], copy: float) -> list[Summary]:
    return [_summary(row, rows, copy) for row in rows if row.kind == MEGALITE]


def _summary(ours: Row, rows: Sequence[Row], copy: float) -> Summary:
    of_op = [row for row in rows if (row.op, row.model) == (ours.op, ours.model)]
    fastest = {}
    for kind in OTHER_KINDS:
        timed = [row for row in of_op if (row.kind, row.part) == (kind, ours.part) and row.seconds]
        if timed:
            fastest[kind] = min(timed, key=median)
    ratios = {}
    if ours.seconds:
        ratios = {kind: ours.seconds.median / median(row) for kind, row in fastest.items()}
    share = share_of_copy(ours, copy)
    targets = {}
    if (ours.op, ours.part) in SHARES:
        least = SHARES[ours.op, ours.part]
        targets[f"≥ {least:.0%} of a copy"] = _verdict(share is not None and share >= least)
    # Where the whole is measured too, implementations differ in what forward does for backward.
    if ours.part == WHOLE_PASS or WHOLE_PASS not in {row.part for row in of_op}:
        rivals = {row.kind for row in of_op if row.status != NO_SUCH_KERNEL}
        targets |= {
            f"≤ {kind}": _at_most(ours, ratios.get(kind), 1.0) for kind in (TORCH_COMPILE, LIGER) if kind in rivals
        }
    if ours.op == "linear_cross_entropy" and ours.part == WHOLE_PASS:
        targets[f"≤ {MAX_MATMUL_RATIO} × matmuls"] = _at_most(ours, ratios.get(MATMULS), MAX_MATMUL_RATIO)
        targets["peak below eager"] = _peak_below(ours, fastest.get(EAGER_TORCH))
    return Summary(ours, share, ratios, targets)


def _peak_below(ours: Row, other: Row | None) -> str:
    if ours.peak_bytes is None or other is None or other.peak_bytes is None:
        return _at_most(ours, None, 1.0)
    return _verdict(ours.peak_bytes < other.peak_bytes)


def _verdict(is_met: bool) -> str:
    return MET_TARGET if is_met else MISSED_TARGET


def _at_most(ours: Row, ratio: float | None, most: float) -> str:
    if ratio is None:
        return UNMEASURED_TARGET if ours.seconds else MISSED_TARGET
    return _verdict(ratio <= most)


def summary_table(found: Sequence[Summary]) -> str:
    heads = [
        "op",
        "model",
        "part",
        "µs",
        "GB/s",
        "% of copy",
        *(f"÷ {kind}" for kind in OTHER_KINDS),
        "peak MiB",
        "targets",
    ]
    rows = []
    for one in found:
        row = one.row
        targets = ", ".join(f"{target}: {verdict}" for target, verdict in one.targets.items())
        ratios = (number(one.ratios.get(kind), 1, "{:.2f}") for kind in OTHER_KINDS)
        cells = [row.op, f"{row.model}, {row.sizes}", row.part, *_measured(row, one.share)]
        rows.append([*cells, *ratios, number(row.peak_bytes, 2**-20), targets if row.seconds else row.status])
    return markdown_table(heads, rows)


def full_table(rows: Iterable[Row], copy: float) -> str:
    heads = ["op", "model", "part", "implementation", "µs", "GB/s", "% of copy", "p10–p90 µs", "rounds", "host µs"]
    lines = []
    for row in rows:
        spread, seconds = "–", row.seconds
        if seconds:
            spread = f"{number(seconds.p10, 1e6)}–{number(seconds.p90, 1e6)}"
        cells = [row.op, row.model, row.part, row.variant, *_measured(row, share_of_copy(row, copy)), spread]
        cells += [number(seconds.rounds if seconds else None, 1, "{:.0f}"), number(row.host_seconds, 1e6)]
        lines.append([*cells, number(row.peak_bytes, 2**-20), row.status])
    return markdown_table([*heads, "peak MiB", "result"], lines)


def result_table(rows: Iterable[Row]) -> str:
    """Table of the results of a run that compares and times nothing."""
    return markdown_table(["op", "implementation", "result"], ([row.op, row.variant, row.status] for row in rows))


def _measured(row: Row, share: float | None) -> list[str]:
    """Time, bandwidth and its share of a copy's."""
    seconds = row.seconds.median if row.seconds else None
    speed = row.moved_bytes / seconds if seconds and row.moved_bytes else None
    return [number(seconds, 1e6), number(speed, 1e-9, "{:,.0f}"), number(share, 100, "{:.0f}")]


def number(value: float | None, scale: float, form: str = "{:,.1f}") -> str:
    return "–" if value is None else form.format(value * scale)


def as_data(head: dict[str, Any], rows: Sequence[Row], copies: dict[str, float]) -> dict[str, Any]:
    """All results as data for JSON. head: facts of the run and its machine; copies: bytes per second of every copy."""
    copy = max(copies.values())
    return {
        **head,
        "copies_bytes_per_second": copies,
        "rows": [asdict(row) | {"share_of_copy": share_of_copy(row, copy)} for row in rows],
        "summary": [
            {"op": one.row.op, "model": one.row.model, "part": one.row.part, "share_of_copy": one.share}
            | {"ratios": one.ratios, "targets": one.targets}
            for one in summaries(rows, copy)
        ],
    }


def page(head: dict[str, Any], rows: Sequence[Row], copies: dict[str, float]) -> str:
    """All results as a page of Markdown."""
    copy = max(copies.values())
    return f"""# The kernels on a GPU

{facts(head, copies)}

Times are medians on the GPU, without the host's. GB/s counts what an op must at least read and write, whatever is moved
beyond that; % of copy is its share of the bandwidth of the copy above. ÷ is the time of megalite's kernel over that of
the fastest other implementation of that kind: below 1, megalite's is faster. Peak memory is above that of the inputs.
Backward's has what forward keeps.

{summary_table(summaries(rows, copy))}
## Every implementation

{full_table(rows, copy)}"""


def facts(head: dict[str, Any], copies: dict[str, float]) -> str:
    """List the facts of the run and its machine, and how fast the machine copies."""
    copy = f"{max(copies.values()) / 1e9:,.0f} GB/s, bytes read and written, the best of {len(copies)}"
    return "\n".join(f"- {name}: {_words(value)}" for name, value in (head | {"copy": copy}).items())


def _words(value: Any) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else str(value)
