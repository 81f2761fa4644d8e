"""Simulated time and memory against what is known in closed form."""

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import free_table, micro_batches, names, randoms, ranks

from megalite.base.errors import InputError
from megalite.schedule.actions import COMPUTE, Action, Kind, Table
from megalite.schedule.generate import NAMES, bubble_of, build
from megalite.schedule.simulate import UNIT, Span, Time, simulate

F, B, I, W = COMPUTE  # noqa: E741
EXACT = {kind: Fraction(cost) for kind, cost in UNIT.items()}


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


@settings(max_examples=60, deadline=None)
@given(ranks, micro_batches, st.integers(1, 4))
def test_interleaving_divides_the_bubble(p: int, m: int, v: int) -> None:
    timeline = simulate(build("interleaved_1f1b", p, m, v), EXACT)
    if m >= p:  # p need not divide m
        assert timeline.bubbles == (Fraction(p - 1, v * m + p - 1),) * p
    first_round = -(-m // max(1, m // p))
    ahead = [(v - 1) * first_round + (2 if v > 1 else 1) * (p - rank - 1) for rank in range(p)]
    assert timeline.peak_live == tuple(min(v * m, forwards + 1) for forwards in ahead)


@given(ranks, micro_batches)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_in_its_memory(p: int, m: int) -> None:
    zb_h1, one_f_one_b = simulate(build("zb_h1", p, m)), simulate(build("1f1b", p, m))
    assert zb_h1.peak_live == (min(m, p),) * p
    assert max(one_f_one_b.peak_live) == min(m, p)
    if m >= p:
        assert zb_h1.makespan - 3 * m == p - 1
        assert one_f_one_b.makespan - 3 * m == 3 * (p - 1)
        assert zb_h1.stalls == tuple(p - 1 - rank for rank in range(p))
        assert one_f_one_b.stalls == tuple(3 * (p - 1 - rank) for rank in range(p))


@given(ranks, micro_batches)
def test_zb_h2_never_waits(p: int, m: int) -> None:
    timeline = simulate(build("zb_h2", p, m))
    assert timeline.peak_live == (min(m, 2 * p - 1),) * p
    assert timeline.makespan <= simulate(build("zb_h1", p, m)).makespan
    if m >= 2 * p - 1:
        assert timeline.stalls == (0,) * p
        assert timeline.makespan == 3 * m + p - 1  # no one-way pipeline is faster: the last rank starts at p − 1


@given(ranks, micro_batches)
def test_zbv_never_waits_in_the_memory_of_1f1b(p: int, m: int) -> None:
    timeline = simulate(build("zbv", p, m), EXACT)
    assert max(timeline.peak_live) == min(2 * m, 2 * p)  # of half the size: 1F1B's p
    if m >= 2 * p - 1:
        assert timeline.peak_live == (2 * p,) * p
        assert timeline.stalls == (0,) * p
        assert timeline.bubble == Fraction(p - 1, 6 * m + p - 1)


@given(ranks, micro_batches)
def test_dualpipev_waits_less_than_a_third_of_1f1b(p: int, m: int) -> None:
    timeline = simulate(build("dualpipev", p, m), EXACT)
    assert max(timeline.peak_live) == min(2 * m, 2 * p + 1)
    if m >= 2 * p:
        assert timeline.peak_live == (2 * p + 1,) * p
        assert timeline.stalls == tuple(p - 1 - rank for rank in range(p))
        assert timeline.bubble == Fraction(p - 1, 6 * m + p - 1)


@given(st.sampled_from(["zb_h1", "zb_h2", "zbv"]), ranks, micro_batches)
def test_splitting_backward_is_never_slower(name: str, p: int, m: int) -> None:
    whole = simulate(build("interleaved_1f1b" if name == "zbv" else "1f1b", p, m))
    assert simulate(build(name, p, m)).makespan <= whole.makespan


def test_activations_live_until_the_weight_gradient() -> None:
    actions = [Action(kind, 0, micro) for kind, micro in ((F, 0), (I, 0), (F, 1), (W, 0), (F, 2), (B, 1), (B, 2))]
    assert simulate(Table("hand-made", 3, (0,), (tuple(actions),))).peak_live == (2,)


def test_gathers_run_beside_compute_one_at_a_time() -> None:
    """Compute waits for the weights of its own stage only; a reduction at the end is part of the makespan."""
    order = [
        *((Kind.GATHER, 0), (Kind.GATHER, 1), (F, 0), (F, 1), (B, 1), (Kind.RESHARD, 1), (Kind.REDUCE, 1)),
        *((B, 0), (Kind.RESHARD, 0), (Kind.REDUCE, 0)),
    ]
    table = Table("hand-made", 1, (0, 0), (tuple(Action(kind, stage, 0) for kind, stage in order),))
    timeline = simulate(table, {F: 2, B: 4, Kind.GATHER: 3, Kind.REDUCE: 5})
    times = [(span.start, span.end) for span in timeline.spans[0]]
    assert times == [(0, 3), (3, 6), (3, 5), (6, 8), (8, 12), (12, 12), (12, 17), (12, 16), (17, 17), (17, 22)]
    assert timeline.makespan == 22
    assert timeline.busy == (12,)
    assert simulate(table, {F: 2, B: 4}).makespan == 12


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
    cost = {(kind, stage): random.randint(1, 9) for kind in COMPUTE for stage in range(table.stages)}
    timeline = simulate(table, lambda action: cost[action.kind, action.stage], transfer)
    ends = {span.action: span.end for rank in timeline.spans for span in rank}
    for rank in timeline.spans:
        free: Time = 0
        for span in (span for span in rank if span.action.is_compute):
            stage, micro = span.action.stage, span.action.micro
            if span.action.kind == Kind.F:
                sources = [Action(Kind.F, stage - 1, micro)] if stage > 0 else []
            elif span.action.kind == Kind.W:
                sources = [Action(Kind.I, stage, micro)]
            else:
                gradients = [Action(kind, stage + 1, micro) for kind in (Kind.B, Kind.I)]
                sources = [gradient for gradient in gradients if gradient in ends]
            arrivals = [ends[s] + transfer * (table.rank(s) != table.rank(span.action)) for s in sources]
            assert span.start == max([free, *arrivals])
            assert span.end == span.start + cost[span.action.kind, stage]
            free = span.end


def test_a_table_that_cannot_run_is_refused() -> None:
    table = Table("hand-made", 1, (0,), ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)),))
    with pytest.raises(InputError, match=r"rank 0 is stuck at B\(stage 0, micro-batch 0\)"):
        simulate(table, {Kind.F: 1, Kind.B: 1})


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 4), st.integers(1, 24))
def test_the_bubble_is_known_before_a_schedule_is_made(name: str, p: int, v: int, m: int) -> None:
    v = v if name == "interleaved_1f1b" else build(name, p, m).stages // p
    assert bubble_of(name, p, m, v) == Fraction(simulate(build(name, p, m, v), EXACT).bubble)


@given(st.integers(1, 7), st.integers(1, 24))
def test_the_bubble_of_passes_that_take_turns_is_known_too(p: int, m: int) -> None:
    paired = build("dualpipev", p, m, paired=True)
    assert bubble_of("dualpipev", p, m, 2, paired=True) == Fraction(simulate(paired, EXACT).bubble)
