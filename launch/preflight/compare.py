"""Findings that only a comparison of nodes, or of their GPUs, shows: a pure function of what each node has measured.

The supervisor gives `compare` the files of an attempt and leaves out the nodes in `Verdict.bad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Optional

from ..base.errors import UserError
from .findings import FAIL, FILE, OK, WARN, Sheet, as_json, number, read_sheet, sheet_path
from .gpus import gpu_values
from .thresholds import Thresholds

COMMON_VERSIONS = ("commit", "torch", "nccl", "driver")  # versions that must be the same on all nodes
COPIES = {"copy to device": "to_device", "copy to host": "to_host"}


@dataclass(frozen=True)
class Verdict:
    """Findings about all nodes together."""

    sheets: Mapping[str, Sheet]  # by node: its own findings and then those of the comparison
    missing: Mapping[str, str]  # nodes that left no file that can be read, and why

    @property
    def ok(self) -> list[str]:
        return [node for node, sheet in self.sheets.items() if sheet.passed]

    @property
    def bad(self) -> dict[str, str]:
        """Nodes that should be left out, each with the reason in one line."""
        failed = {node: sheet.reason for node, sheet in self.sheets.items() if not sheet.passed}
        return {**failed, **self.missing}

    def as_json(self) -> dict[str, Any]:
        nodes = {node: as_json(sheet) for node, sheet in self.sheets.items()}
        return {"passed": not self.bad, "ok": self.ok, "bad": self.bad, "nodes": nodes}


def compare_folder(folder: Path, thresholds: Thresholds, nodes: Optional[Sequence[str]] = None) -> Verdict:
    """Compare the files in the folder of an attempt. nodes: those that should be there; None: those that are.

    A node without a file, or with one that cannot be read, is bad. Raises UserError if there is no node at all.
    """
    if nodes is None:
        try:
            names = [FILE.fullmatch(path.name) for path in sorted(folder.iterdir())]
        except OSError as error:
            raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
        nodes = [name["node"] for name in names if name]
        if not nodes:
            raise UserError(f"{folder}: has no preflight-NODE.json; give the folder of an attempt that was checked")
    sheets, missing = [], {}
    for node in nodes:
        path = sheet_path(folder, node)
        try:
            sheets.append(read_sheet(path))
        except UserError as error:
            missing[node] = str(error) if path.exists() else "has not finished its preflight: it left no file"
    return compare(sheets, thresholds, missing)


def compare(sheets: Sequence[Sheet], thresholds: Thresholds, missing: Optional[Mapping[str, str]] = None) -> Verdict:
    """Add to copies of the sheets what follows from all of them. missing: nodes without one, and why."""
    nodes = [deepcopy(sheet) for sheet in sheets]
    for gpu in dict.fromkeys(sheet.gpu for sheet in nodes):
        alike = [sheet for sheet in nodes if sheet.gpu == gpu]
        _speeds(alike, thresholds)
        _bits(alike)
        _all_reduce(alike, thresholds)
        _pairs(alike, thresholds)
    _kinds(nodes)
    _clocks(nodes, thresholds)
    _same_versions(nodes)
    return Verdict({sheet.node: sheet for sheet in nodes}, dict(missing or {}))


def _kinds(nodes: Sequence[Sheet]) -> None:
    if len({sheet.gpu for sheet in nodes}) > 1:
        usual = _most([sheet.gpu for sheet in nodes])
        for sheet in nodes:
            if sheet.gpu != usual:
                text = f"GPUs are {sheet.gpu or 'not known'}, on most nodes {usual or 'not known'}"
                sheet.add("GPU kind", FAIL, sheet.gpu, "one kind", text)


def _speeds(nodes: Sequence[Sheet], thresholds: Thresholds) -> None:
    """Compare each GPU with the median of all: matrix products and copies."""
    for check, key in {"matmul": "matmul", **COPIES}.items():
        values = {sheet.node: gpu_values(sheet.measured, key) for sheet in nodes}
        every = [value for found in values.values() for _, value in found]
        if len(every) < 2:
            continue
        middle = median(every)
        unit, scale = ("TFLOP/s", 1e12) if key == "matmul" else ("GB/s", 1e9)
        for sheet in nodes:
            if values[sheet.node]:
                place, slowest = min(values[sheet.node], key=lambda pair: pair[1])
                share = slowest / middle if middle > 0 else 0.0
                text = (
                    f"{device(sheet)} {place}: {slowest / scale:.4g} {unit}, {share:.0%} of the median of {len(every)}"
                )
                limit = "matmul" if key == "matmul" else "copy"
                sheet.judge(check, round(share, 4), "<", thresholds.of(sheet.gpu), limit, text)


def _bits(nodes: Sequence[Sheet]) -> None:
    """Equal GPUs with the same PyTorch give the same bits."""
    for torch in {sheet.versions.get("torch") for sheet in nodes}:
        alike = [sheet for sheet in nodes if sheet.versions.get("torch") == torch]
        digests = {sheet.node: _digests(sheet) for sheet in alike}
        every = [digest for found in digests.values() for digest in found]
        if len(every) < 2:
            continue
        usual = _most(every)
        for sheet in alike:
            wrong = [f"{device(sheet)} {place}" for place, digest in enumerate(digests[sheet.node]) if digest != usual]
            text = (
                f"{', '.join(wrong)}: other bits than most of {len(every)}" if wrong else f"equal on all {len(every)}"
            )
            if digests[sheet.node]:
                sheet.add("result bits", FAIL if wrong else OK, wrong, "equal on all", text)


def device(sheet: Sheet) -> str:
    return "rank" if sheet.gpu == "cpu" else "GPU"


def _digests(sheet: Sheet) -> list[str]:
    found = sheet.measured.get("gpus")
    rows = found if isinstance(found, list) else []
    return [str(row["digest"]) for row in rows if isinstance(row, Mapping) and "digest" in row]


def _all_reduce(nodes: Sequence[Sheet], thresholds: Thresholds) -> None:
    """Compare each node's own all-reduce with the figure for its kind of GPU, or else with the other nodes."""
    rates = {sheet.node: number(sheet.measured, "all_reduce") for sheet in nodes}
    known = [rate for rate in rates.values() if rate]
    for sheet in nodes:
        rate, limits = rates[sheet.node], thresholds.of(sheet.gpu)
        gpus = len(gpu_values(sheet.measured, "matmul"))
        if rate is None or gpus < 2:
            continue
        if limits.number("all_reduce_gpus") == gpus and limits.number("all_reduce_fail") is not None:
            text = f"{rate / 1e9:.4g} GB/s bus bandwidth over {gpus} GPUs"
            sheet.judge("all-reduce in node", round(rate / 1e9, 3), "<", limits, "all_reduce", text)
        else:
            middle = median(known) if known else rate
            share = rate / middle if middle else 1.0
            text = f"{rate / 1e9:.4g} GB/s bus bandwidth over {gpus} ranks"
            text += f", {share:.0%} of the median of {len(known)} nodes" if len(known) > 1 else ""
            sheet.judge("all-reduce in node", round(share, 4), "<", limits, "node", text)


def pair_rates(sheet: Sheet) -> dict[str, list[float]]:
    """Bytes/s of the all-reduces with each partner; 0 for one that failed; none for a partner that did not come."""
    rates: dict[str, list[float]] = {}
    found = sheet.measured.get("pairs")
    for pair in found if isinstance(found, list) else []:
        if isinstance(pair, Mapping) and "absent" not in pair:
            rates.setdefault(str(pair.get("partner")), []).append(number(pair, "rate") or 0.0)
    return rates


def _pairs(nodes: Sequence[Sheet], thresholds: Thresholds) -> None:
    """A node is bad if all its pairs are slow, at least two: one slow pair may be the partner's fault."""
    rates = {sheet.node: [rate for found in pair_rates(sheet).values() for rate in found] for sheet in nodes}
    # The fastest pair of each node, since a bad node also slows a pair of each partner.
    fastest = [max(found) for found in rates.values() if found]
    middle = median(fastest) if fastest else 0.0
    for sheet in nodes:
        found, limits = rates[sheet.node], thresholds.of(sheet.gpu)
        if not found:
            continue
        network, best = number(sheet.measured, "network"), max(found)
        fail, warn = limits.number("pair_fail"), limits.number("pair_warn")
        whole, of = (network, "the adapters' sum") if network else (middle, "the median of nodes")
        slow = fail is not None and best < fail * whole
        result = FAIL if slow and len(found) > 1 else WARN if slow or (warn and best < warn * middle) else OK
        result = FAIL if best == 0.0 and len(found) > 1 else result
        partners = ", ".join(f"{name}: {max(some) / 1e9:.3g}" for name, some in pair_rates(sheet).items())
        text = f"GB/s with {partners}; {of} is {whole / 1e9:.3g}"
        text += "; no third node tells which of the two it is" if result == FAIL and len(nodes) == 2 else ""
        rule = f"fail if all < {fail:g} of {of}, warn < {warn:g} of the median" if fail and warn else ""
        sheet.add("pairs of nodes", result, round(best / 1e9, 3), rule, text)


def _clocks(nodes: Sequence[Sheet], thresholds: Thresholds) -> None:
    """Compare each clock with the median of all; two clocks with the board's, by which both were measured."""
    found = {sheet.node: number(sheet.measured, "clock", "offset") for sheet in nodes}
    offsets = {node: offset for node, offset in found.items() if offset is not None}
    if len(offsets) < 2:
        return
    middle = median(offsets.values()) if len(offsets) > 2 else 0.0
    for sheet in nodes:
        if sheet.node in offsets:
            off = offsets[sheet.node] - middle
            sure = max(0.0, abs(off) - (number(sheet.measured, "clock", "round_trip") or 0.0) / 2)
            text = f"{off * 1e3:+.1f} ms beside the other nodes' clocks"
            sheet.judge("clock offset", round(sure, 6), ">", thresholds.of(sheet.gpu), "clock", text)


def _same_versions(nodes: Sequence[Sheet]) -> None:
    for name in COMMON_VERSIONS:
        versions = {sheet.node: sheet.versions.get(name) for sheet in nodes}
        known = [version for version in versions.values() if version is not None]
        if len(known) < 2:
            continue
        usual = _most(known)
        for sheet in nodes:
            own = versions[sheet.node]
            if own is not None:
                text = f"{own:.60}, on most nodes {usual:.60}" if own != usual else f"{own:.60} on all"
                sheet.add(f"{name} version", FAIL if own != usual else OK, own, "the same on all nodes", text)


def _most(values: Sequence[str]) -> str:
    """The most frequent; of several, the first."""
    return Counter(values).most_common(1)[0][0]
