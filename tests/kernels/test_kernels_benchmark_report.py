"""The benchmark of the kernels: what it says of made-up measurements."""

import json
from dataclasses import replace

import pytest

from megalite_kernels.benchmarks.cases import WHOLE_PASS
from megalite_kernels.benchmarks.measure import AGREEMENT, NO_SUCH_KERNEL, Row
from megalite_kernels.benchmarks.report import MET_TARGET, MISSED_TARGET, UNMEASURED_TARGET, as_data, page, summaries
from megalite_kernels.benchmarks.timing import Spread
from megalite_kernels.benchmarks.variants import EAGER_TORCH, LIGER, MATMULS, MEGALITE, TORCH_COMPILE


def _row(kind: str, micros: float | None, op: str = "swiglu", part: str = "forward", **changes: object) -> Row:
    seconds = None if micros is None else Spread(micros * 0.9e-6, micros * 1e-6, micros * 1.1e-6, 50)
    row = Row(op, "8B", "2 × 3", kind, kind, AGREEMENT, part, seconds, 1e-5, 1 << 20, 900)
    return replace(row, **changes)


def _targets(*rows: Row) -> dict[str, str]:
    (found,) = summaries(rows, copy=1e9)
    return found.targets


def test_targets() -> None:
    """900 bytes at 1 GB/s take 0.9 µs; the target is 90 % of that."""
    rivals = [_row(TORCH_COMPILE, 1.2), _row(EAGER_TORCH, 0.1), _row(LIGER, 1.0)]
    names = "≥ 90% of a copy", "≤ torch.compile", "≤ Liger"
    assert _targets(_row(MEGALITE, 0.999), *rivals) == dict.fromkeys(names, MET_TARGET)
    assert _targets(_row(MEGALITE, 1.001), *rivals) == dict(
        zip(names, (MISSED_TARGET, MET_TARGET, MISSED_TARGET), strict=True)
    )
    assert _targets(_row(MEGALITE, 1.0), *rivals) == dict.fromkeys(names, MET_TARGET)
    assert _targets(_row(MEGALITE, 1.201), *rivals) == dict.fromkeys(names, MISSED_TARGET)
    absent = _row(LIGER, None, part="", status="not installed")
    assert _targets(_row(MEGALITE, 0.9), *rivals[:2], absent) == dict(
        zip(names, (MET_TARGET, MET_TARGET, UNMEASURED_TARGET), strict=True)
    )
    assert list(_targets(_row(MEGALITE, 0.9), replace(absent, status=NO_SUCH_KERNEL))) == [names[0]]
    failed = _row(MEGALITE, None, status="failed: RuntimeError: no")
    assert _targets(failed, *rivals) == dict.fromkeys(names, MISSED_TARGET)
    assert _targets(_row(MEGALITE, 1.1, part="backward"), absent)["≥ 85% of a copy"] == MISSED_TARGET


def test_parts_are_judged_together_where_implementations_divide_work_differently() -> None:
    rows = [_row(MEGALITE, 1.0, "cross_entropy", part) for part in ("forward", "backward", WHOLE_PASS)]
    rows += [_row(LIGER, micros, "cross_entropy", part) for part, micros in (("backward", 0.1), (WHOLE_PASS, 1.1))]
    forward, backward, whole = summaries(rows, copy=1e9)
    assert (forward.targets, backward.targets) == ({}, {})
    assert whole.targets == {"≥ 85% of a copy": MET_TARGET, "≤ Liger": MET_TARGET}
    assert backward.ratios == {LIGER: pytest.approx(10)}


def test_targets_beside_matrix_products_and_the_fastest_of_a_kind() -> None:
    def of(*changes: dict[str, object]) -> dict[str, str]:
        rows = [
            _row(kind, 1.0, "linear_cross_entropy", WHOLE_PASS)
            for kind in (MATMULS, EAGER_TORCH, LIGER, LIGER, MEGALITE)
        ]
        return _targets(*(replace(row, moved_bytes=None, **change) for row, change in zip(rows, changes, strict=True)))

    slow = {"seconds": Spread(2e-6, 2e-6, 2e-6, 9)}
    ours = {"seconds": Spread(1e-6, 1.05e-6, 2e-6, 9), "peak_bytes": 1 << 19}
    rest = {"≤ Liger": MISSED_TARGET}
    assert of({}, {}, slow, {}, ours) == {**rest, "≤ 1.05 × matmuls": MET_TARGET, "peak below eager": MET_TARGET}
    slower = {"seconds": Spread(1e-6, 1.06e-6, 2e-6, 9)}
    assert of({}, {}, {}, slow, slower) == {
        **rest,
        "≤ 1.05 × matmuls": MISSED_TARGET,
        "peak below eager": MISSED_TARGET,
    }


def test_page_and_data() -> None:
    failed = Row("swiglu", "8B", "2 × 3", EAGER_TORCH, EAGER_TORCH, "failed: TypeError: x | y")
    rows = [_row(MEGALITE, 1.0), _row(TORCH_COMPILE, 2.0), failed]
    head = {"command": "run", "device": {"name": "GPU", "memory": "80"}}
    text = page(head, rows, {"small": 5e8, "large": 1e9})
    assert "- device: name GPU, memory 80\n- copy: 1 GB/s" in text
    summary = next(line for line in text.splitlines() if line.startswith("| swiglu | 8B, 2 × 3"))
    cells = [cell.strip() for cell in summary.strip("|").split("|")]
    assert cells[2:] == [
        *("forward", "1.0", "1", "90", "0.50", "–", "–", "–", "1.0"),
        "≥ 90% of a copy: met, ≤ torch.compile: met",
    ]
    assert "| swiglu | 8B | forward | torch.compile | 2.0 | 0 | 45 | 1.8–2.2 | 50 | 10.0 | 1.0 | agrees |" in text
    assert "| eager | – | – | – | – | – | – | – | failed: TypeError: x / y |" in text
    data = json.loads(json.dumps(as_data(head, rows, {"small": 5e8, "large": 1e9})))
    assert data["rows"][1]["seconds"]["median"] == 2e-6
    assert [row["share_of_copy"] for row in data["rows"]] == [pytest.approx(0.9), pytest.approx(0.45), None]
    assert data["summary"][0]["targets"] == {"≥ 90% of a copy": MET_TARGET, "≤ torch.compile": MET_TARGET}
