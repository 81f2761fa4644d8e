"""Simulated time and memory against what is known in closed form."""

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import free_table, micro_batches, names, randoms, ranks

from megalite.config.errors import InputError
from megalite.schedule.actions import Action, Kind, Table
from megalite.schedule.generate import build
from megalite.schedule.simulate import Span, Time, simulate


@given(names, ranks, micro_batches, st.integers(1, 3))
def test_bubble_is_the_textbook_one(name: str, p: int, m: int, backward: int) -> None:
    timeline = simulate(build(name, p, m), {Kind.F: Fraction(1), Kind.B: Fraction(backward)})
    assert timeline.makespan == (m + p - 1) * (1 + backward)
    assert timeline.bubbles == (Fraction(p - 1, m + p - 1),) * p
    assert timeline.bubble == Fraction(p - 1, m + p - 1)


@given(ranks, micro_batches)
def test_peak_of_live_activations(p: int, m: int) -> None:
    costs = {Kind.F: 1, Kind.B: 2}
    assert simulate(build("gpipe", p, m), costs).peak_live == (m,) * p
    assert simulate(build("1f1b", p, m), costs).peak_live == tuple(min(m, p - rank) for rank in range(p))


def test_transfers_delay_only_who_waits_for_them() -> None:
    first, second = simulate(build("1f1b", 2, 1), {Kind.F: 2, Kind.B: 4}, transfer=1).spans
    assert first == (
        Span(Action(Kind.F, 0, 0), 0, 2),
        Span(Action(Kind.SEND_F, 0, 0), 2, 3),
        Span(Action(Kind.RECV_B, 0, 0), 9, 10),
        Span(Action(Kind.B, 0, 0), 10, 14),
    )
    assert second == (
        Span(Action(Kind.RECV_F, 1, 0), 2, 3),
        Span(Action(Kind.F, 1, 0), 3, 5),
        Span(Action(Kind.B, 1, 0), 5, 9),
        Span(Action(Kind.SEND_B, 1, 0), 9, 10),
    )


def test_the_slowest_stage_sets_the_pace() -> None:
    timeline = simulate(build("1f1b", 2, 100), lambda action: 3 if action.stage == 1 else 1)
    assert timeline.makespan == 1 + 100 * (3 + 3) + 1
    assert timeline.bubbles == (pytest.approx(402 / 602), pytest.approx(2 / 602))


@given(randoms, st.integers(0, 5))
def test_compute_starts_as_soon_as_rank_and_inputs_allow(random: Random, transfer: int) -> None:
    table = free_table(random)
    cost = {(kind, stage): random.randint(1, 9) for kind in (Kind.F, Kind.B) for stage in range(table.stages)}
    timeline = simulate(table, lambda action: cost[action.kind, action.stage], transfer)
    ends = {span.action: span.end for rank in timeline.spans for span in rank}
    for rank in timeline.spans:
        free: Time = 0
        for span in (span for span in rank if span.action.is_compute):
            stage, micro = span.action.stage, span.action.micro
            if span.action.kind == Kind.F:
                sources = [Action(Kind.F, stage - 1, micro)] if stage > 0 else []
            else:
                sources = [Action(Kind.B, stage + 1, micro)] if stage < table.stages - 1 else []
            arrivals = [ends[s] + transfer * (table.rank(s) != table.rank(span.action)) for s in sources]
            assert span.start == max([free, *arrivals])
            assert span.end == span.start + cost[span.action.kind, stage]
            free = span.end


def test_a_table_that_cannot_run_is_refused() -> None:
    table = Table("hand-made", 1, (0,), ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),))
    with pytest.raises(InputError, match=r"rank 0 is stuck at B\(stage 0, micro-batch 0\)"):
        simulate(table, {Kind.F: 1, Kind.B: 1})
