"""The table of measured training steps, as a page of Markdown. Imports no torch.

Times are compared within a group only: the same model, tokens, batch, precision and GPUs. Repeats of a case, whose ids
end in `-r1`, `-r2` and so on, are one line, that of the median.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megalite.base.errors import counted, printable
from megalite_launch.base.texts import markdown_table
from megalite_tools.bench.training.cases import MEGALITE, Case
from megalite_tools.bench.training.rows import DISAGREEMENT, OK, Row

MAX_REASON_LENGTH = 300  # characters of a reason
REPEAT = re.compile(r"-r\d+$")
STEPS = (
    "implementation",
    "step ms (p10–p90)",
    "tokens/s/GPU",
    "MFU full",
    "MFU causal",
    "of best GEMM",
    "peak GiB",
    "compile s",
    "attention",
    "W",
    "MHz",
    "loss, first → last",
    "predicted",
    "÷ best megalite",
)
KINDS = ("gemm", "attention", "norm", "rope", "swiglu", "loss", "optimizer", "compiled", "pointwise", "copy", "gap")
LIMITS_OF_ONE_GPU = """One GPU cannot show NCCL and anything between ranks: tensor, pipeline, context and expert parallelism, sharding, and what
of their communication is hidden; nor two nodes, nor a slow rank. Its data-parallel step exchanges nothing.
"""  # noqa: E501 - a line of the page


def page(rows: Mapping[str, Row], cases: Sequence[Case], head: Mapping[str, Any]) -> str:
    """Everything that is known: programs and tests, training steps by group, kinds of kernels, and what is missing.

    cases: those of the plan, of which some have no row yet. head: the machine and the command.
    """
    steps = [row for row in rows.values() if row.get("implementation")]
    programs = [row for row in rows.values() if not row.get("implementation")]
    parts = [f"# Training steps, measured\n\n{_head(head, rows)}"]
    if len(head.get("gpus", ())) < 2:
        parts.append(LIMITS_OF_ONE_GPU)
    if programs:
        parts.append(f"## Programs and tests\n\n{_programs(programs, steps)}")
    for group in sorted({str(row.get("group")) for row in steps}):
        members = [row for row in steps if str(row.get("group")) == group]
        parts.append(f"## {group}\n\n{_group(members, head.get('best_gemm'))}{_by_kind(members)}")
    if fastest := _fastest(steps):
        parts.append(f"## The fastest that ran, of any batch and recompute\n\n{fastest}")
    missing = [case.id for case in cases if case.id not in rows]
    if missing:
        parts.append(f"## Not run\n\n{', '.join(missing)}\n")
    return "\n".join(parts)


def can_be_shown(row: Row) -> bool:
    """Return whether a row has the shape that tables need: a file may hold a row of an earlier program, or anything."""
    try:
        page({row["id"]: {"written": 0.0, **row}}, [], {"best_gemm": 1.0})
        return isinstance(row.get("written", 0.0), int | float) and all(map(float, row.get("loss") or ())) in (
            True,
            False,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        return False


def _head(head: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    lines = [f"- {key}: {_words(head[key])}" for key in ("command", "began", "until", "machine", "gpus") if key in head]
    commits = sorted({str(row["commit"]) for row in rows.values() if row.get("commit")})
    versions: Mapping[str, Any] = next((row["versions"] for row in rows.values() if row.get("versions")), {})
    lines += [f"- commit: {', '.join(commits)}"] * bool(commits) + [f"- versions: {_words(versions)}"] * bool(versions)
    return "\n".join(lines) + "\n"


def _programs(rows: Iterable[Row], steps: Sequence[Row]) -> str:
    """The results of programs, tests and whole runs of training. steps: rows that a run is compared with."""
    lines = []
    for row in rows:
        tests = row.get("tests", {})
        told = ", ".join(f"{count} {name}" for name, count in tests.items() if name != "names")
        if tests.get("names"):
            told += f": {', '.join(tests['names'])}"
        lines.append(
            [row["id"], row["status"], f"{row.get('seconds', 0):.0f}", told or _whole_run(row, steps), _why(row)]
        )
    return markdown_table(["id", "status", "seconds", "result", "why"], lines)


def _whole_run(row: Row, steps: Sequence[Row]) -> str:
    """Times of `megalite train` from data to checkpoint, beside the bare step of the same settings."""
    told = []
    if wall := row.get("wall_ms"):
        bare = [each["step_ms"]["median"] for each in steps if _is_bare_step_of(row, each)]
        beside = f", {wall['median'] / min(bare):.3f}× the bare step" if bare else ""
        told.append(f"{wall['median']:.1f} ms a step with loader and reports{beside}")
    for save in row.get("saves", ()):
        speed = f"{save['bytes'] / 1e9:.1f} GB saved in {save['complete_seconds']:.1f} s"
        told.append(f"{speed}, training stood still for {save['stall_seconds']:.2f} s")
    for place, start in enumerate(row.get("starts", ())):
        told.append(f"{'resumed' if place else 'started'} in {start['seconds_to_first_step']:.1f} s")
    return "; ".join(told)


def _is_bare_step_of(run: Row, row: Row) -> bool:
    same = (row.get("group"), row.get("settings")) == (run.get("group"), run.get("settings"))
    return same and row["status"] == OK and row["implementation"] == MEGALITE


def _group(rows: Sequence[Row], gemm: float | None) -> str:
    lines = [_line(repeats, gemm) for repeats in _repeats(rows)]
    best = min((line for line in lines if line["ours"] and line["ms"] is not None), key=_ms, default=None)
    shown = []
    for line in sorted(lines, key=lambda line: (line["ms"] is None, line["ms"])):
        ratio = "–" if best is None or line["ms"] is None else _ratio(line, best)
        shown.append([*line["cells"], ratio])
    return markdown_table(STEPS, shown)


def _fastest(rows: Iterable[Row]) -> str:
    """Table of the most tokens per second that each implementation has reached with each model; "" if none has."""
    best: dict[tuple[str, str], Row] = {}
    for row in filter(None, map(_typical, _repeats(rows))):
        key = (f"{row['model']}, {counted(row['ranks'], 'rank')}", row["implementation"])
        if row["tok_s"] > best.get(key, {}).get("tok_s", 0):
            best[key] = row
    lines = []
    for (model, implementation), row in sorted(best.items()):
        ours = best.get((model, MEGALITE))
        ratio = f"{ours['tok_s'] / row['tok_s']:.3f}" if ours else "–"
        lines.append([model, implementation, row["id"], f"{row['tok_s']:,.0f}", _percent(row.get("F")), ratio])
    heads = ["model", "implementation", "id", "tokens/s/GPU", "MFU full", "megalite ÷ this"]
    return markdown_table(heads, lines) if lines else ""


def _repeats(rows: Iterable[Row]) -> list[list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(REPEAT.sub("", row["id"]), []).append(row)
    return list(found.values())


def _typical(repeats: Sequence[Row]) -> Row | None:
    """The repeat of median time, the slower one of two; None where none is ok, or one computes something else."""
    fine = sorted((row for row in repeats if row["status"] == OK and row.get("step_ms")), key=_median)
    disagrees = any(row["status"] == DISAGREEMENT for row in repeats)
    return None if disagrees or not fine else fine[len(fine) // 2]


def _median(row: Row) -> float:
    return float(row["step_ms"]["median"])


def _line(repeats: Sequence[Row], gemm: float | None) -> dict[str, Any]:
    """One line of a group. Without a time where there is none to compare, and then with the reason."""
    row = _typical(repeats)
    ours, runs = repeats[0].get("implementation") == MEGALITE, sum(each["status"] == OK for each in repeats)
    predicted = (row or repeats[0]).get("predicted") or {}
    expected = f"{predicted['step_ms']:.1f} ms ± {predicted['spread']:.0%}" if predicted else "–"
    if row is None:
        bad = next((each for each in repeats if each["status"] == DISAGREEMENT), repeats[0])
        blank = [*["–"] * (len(STEPS) - 4), expected]
        return {"ours": ours, "ms": None, "cells": [_name(bad), f"{bad['status']}: {_why(bad)}", *blank]}
    ms, p10, p90 = (float(row["step_ms"][key]) for key in ("median", "p10", "p90"))
    if predicted:
        expected += f" ({predicted['step_ms'] / ms:.2f}×)"
    share = row["tok_s"] * row["flops"]["full"] / gemm if gemm and row.get("flops") else None
    cells = [
        _name(row) + (f", {runs} runs" if runs > 1 else ""),
        f"{ms:.1f} ({p10:.1f}–{p90:.1f})",
        f"{row['tok_s']:,.0f}",
        _percent(row.get("F")),
        _percent(row.get("C")),
        _percent(share),
        f"{row['peak_alloc'] / 2**30:.1f}" if row.get("peak_alloc") else "–",
        f"{row['compile_s']:.0f}" if row.get("compile_s") else "–",
        row.get("attention") or "–",
        f"{row['power_w']['median']:.0f}" if row.get("power_w") else "–",
        f"{row['sm_mhz']:.0f}" if row.get("sm_mhz") else "–",
        f"{row['loss'][0]:.3f} → {row['loss'][-1]:.3f}",
        expected,
    ]
    return {"ours": ours, "ms": ms, "range": (p10, p90), "cells": cells}


def _ms(line: Mapping[str, Any]) -> float:
    return float(line["ms"])


def _ratio(line: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Ratio of a step's time to that of megalite's best, as text; a tie where the ranges of both meet."""
    if line is best:
        return "1"
    (low, high), (least, most) = line["range"], best["range"]
    tie = " (tie)" if low <= most and least <= high else ""
    return f"{line['ms'] / best['ms']:.3f}{tie}"


def _name(row: Row) -> str:
    """An implementation with what is special about its settings."""
    told, parts = row.get("settings", {}), [str(row.get("label", row["id"]))]
    if row.get("implementation") == MEGALITE:
        parts += [str(told["mode"])] if told.get("mode") else []
        parts += [f"{told['overlap']} overlap"] if told.get("overlap", "pieces") != "pieces" else []
        parts += [f"kernels {told['kernels']}"] if told.get("kernels") in ("torch", "triton") else []
    if told.get("recompute", "none") != "none":
        parts.append(f"{told['recompute']} recompute")
    if row.get("note"):
        parts.append(f"[{str(row['note'])[:MAX_REASON_LENGTH]}]")
    return ", ".join(parts)


def _by_kind(rows: Sequence[Row]) -> str:
    told = [row for row in rows if row.get("ms_by_kind")]
    if not told:
        return ""
    kinds = [kind for kind in KINDS if any(kind in row["ms_by_kind"] for row in told)]
    kinds += sorted({kind for row in told for kind in row["ms_by_kind"]} - set(kinds))
    lines = []
    for row in told:
        numbers = [f"{row['ms_by_kind'][kind]:.1f}" if kind in row["ms_by_kind"] else "–" for kind in kinds]
        waits = "–" if row.get("syncs_per_step") is None else str(row["syncs_per_step"])
        lines.append([row["id"], *numbers, f"{row.get('kernels_per_step', 0):.0f}", waits])
    return f"\nMilliseconds of a step by kind of kernel:\n\n{markdown_table(['id', *kinds, 'kernels', 'waits'], lines)}"


def _why(row: Row) -> str:
    return "; ".join(str(row[key]) for key in ("reason", "note") if row.get(key))[:MAX_REASON_LENGTH]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    return printable(str(value))
