"""The bound on a step of one GPU: what its operations are, and laws that it keeps whatever the rates."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.cost.program import attention_shares
from megalite.dry_run.run import fake_world
from megalite.plan.model.size import flops_per_token
from megalite_tools.bench.roofline import ASSUMED_RATES, GPU, ROWS, Rates, Row, Work, mfu, work_of

AMOUNTS = st.floats(1e9, 1e18)
WORKS = st.builds(
    Work,
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    st.sampled_from(sorted(ASSUMED_RATES.products)),
    st.sampled_from((64, 128)),
)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(0, 2):
        yield


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_operations_of_a_model_are_in_its_work(row: Row) -> None:
    """Three passes of matrix products, and twice as much attention backward as forward by the usual count."""
    work, tokens = work_of(row), row.batch * row.model.sequence_length
    assert work.products + work.head + 3 * work.attention == tokens * flops_per_token(row.model, "causal")
    assert mfu(row, 2.0)[1] == pytest.approx(mfu(row, 1.0)[1] / 2)


def test_measured_shares_are_the_best_of_the_record() -> None:
    files = sorted(Path("docs/benchmarks/gpu/h200_2026_11_26").glob("*.json"))
    runs = [run for path in files for run in json.loads(path.read_text()).get("rows", []) if "F" in run]
    for row, cases in ((ROWS[0], "1b-megalite-compiled"), (ROWS[2], "8b8-megalite-(eager|compiled)")):
        best = max((run["F"], run["C"]) for run in runs if re.fullmatch(cases, run["id"]))
        assert row.measured == tuple(round(100 * share, 1) for share in best)


@given(WORKS, st.floats(1.0, 100.0))
def test_a_bound_is_never_above_its_rates_and_no_worse_with_faster_parts(work: Work, times: float) -> None:
    rates = ASSUMED_RATES
    computed = work.products + work.head + 3 * work.attention
    best = max(
        *rates.products.values(),
        rates.head,
        *(GPU.peak["bf16"] * share for share in attention_shares("cudnn", GPU.name, 128)),
    )
    assert computed / work.seconds() <= best * (1 + 1e-12)
    assert work.bytes / work.seconds() <= rates.memory * (1 + 1e-12)
    faster = (
        replace(rates, memory=times * rates.memory),
        replace(rates, head=times * rates.head),
        replace(rates, products={width: times * rate for width, rate in rates.products.items()}),
        Rates(attention="flash3"),
    )
    assert all(work.seconds(each) <= work.seconds() for each in faster)
    assert max(rates.products.values()) <= GPU.measured["bf16"] <= GPU.peak["bf16"]
