"""What the generated schedules are."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from schedule_cases import micro_batches, names, tables

from megalite.base.errors import InputError
from megalite.schedule.actions import Action, Exchange, Kind, Program, Table
from megalite.schedule.check import check
from megalite.schedule.communication import communicate
from megalite.schedule.file import write
from megalite.schedule.generate import NAMES, build, build_forward
from megalite.schedule.simulate import simulate


def short(program: Program) -> str:
    """`F0 [SEND_F0] B0`: kinds and micro-batches; exchanges in brackets."""

    def one(item: Action | Exchange) -> str:
        return f"[{' '.join(map(one, item.actions))}]" if isinstance(item, Exchange) else f"{item.kind}{item.micro}"

    return " ".join(map(one, program))


def test_gpipe_as_written_down() -> None:
    assert [short(program) for program in build("gpipe", 2, 2).programs] == [
        "F0 [SEND_F0] F1 [SEND_F1] [RECV_B0] B0 [RECV_B1] B1",
        "[RECV_F0] F0 [RECV_F1] F1 B0 [SEND_B0] B1 [SEND_B1]",
    ]


def test_1f1b_as_written_down() -> None:
    assert [short(program) for program in build("1f1b", 3, 4).programs] == [
        "F0 [SEND_F0] F1 [SEND_F1] F2 [SEND_F2] [RECV_B0] B0 F3 [RECV_B1 SEND_F3] B1 [RECV_B2] B2 [RECV_B3] B3",
        "[RECV_F0] F0 [RECV_F1 SEND_F0] F1 [RECV_F2 SEND_F1] [RECV_B0] B0 [SEND_B0] F2 [RECV_B1 SEND_F2] B1 "
        "[SEND_B1 RECV_F3] F3 [RECV_B2 SEND_F3] B2 [SEND_B2] [RECV_B3] B3 [SEND_B3]",
        "[RECV_F0] F0 [RECV_F1] B0 [SEND_B0] F1 B1 [SEND_B1 RECV_F2] F2 B2 [SEND_B2 RECV_F3] F3 B3 [SEND_B3]",
    ]


def orders(table: Table) -> list[str]:
    return [line[4:] for line in write(table).splitlines() if line.startswith("  - ")]


def test_interleaved_as_written_down() -> None:
    assert orders(build("interleaved_1f1b", 2, 3)) == [  # one round: 3 is not divisible by 2
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2",
    ]
    assert orders(build("interleaved_1f1b", 2, 5))[1] == (  # rounds of 3 and 2
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 F3.4 B3.3 B3.4 B1.3 B1.4"
    )


def test_zero_bubble_as_written_down() -> None:
    assert orders(build("zb_h1", 3, 4)) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3",
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3",
    ]
    assert orders(build("zb_h2", 2, 4)) == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 F1.3 I1.3 W1.1 W1.2 W1.3",
    ]


def test_v_shapes_as_written_down() -> None:
    assert orders(build("zbv", 2, 3)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2",
    ]
    assert orders(build("dualpipev", 1, 2)) == ["F0.0 F1.0 F0.1 B1.0 F1.1 B0.0 B1.1 I0.1 W0.1"]


@pytest.mark.parametrize(
    ("name", "v", "placement"),
    [
        ("1f1b", 1, (0, 1, 2)),
        ("zb_h2", None, (0, 1, 2)),
        ("interleaved_1f1b", None, (0, 1, 2, 0, 1, 2)),
        ("interleaved_1f1b", 3, (0, 1, 2, 0, 1, 2, 0, 1, 2)),
        ("zbv", None, (0, 1, 2, 2, 1, 0)),
        ("dualpipev", 2, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_placement(name: str, v: int | None, placement: tuple[int, ...]) -> None:
    assert build(name, 3, 4, v).placement == placement


@settings(max_examples=60, deadline=None)
@given(tables())
def test_every_stage_takes_micro_batches_in_order(table: Table) -> None:
    """So gradients are accumulated in one order, whatever the schedule."""
    for order in table.orders:
        for stage in {action.stage for action in order}:
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                micros = [action.micro for action in order if action.stage == stage and action.kind in kinds]
                assert micros == list(range(table.micro_batches))


def test_one_stage_per_rank_interleaves_nothing() -> None:
    assert build("interleaved_1f1b", 4, 6, 1).programs == build("1f1b", 4, 6).programs


def test_dualpipev_pairs_a_forward_and_a_backward_of_other_stages() -> None:
    p, m = 4, 20
    for rank, order in enumerate(build("dualpipev", p, m).orders):
        backwards = [index for index, action in enumerate(order) if action.kind == Kind.B]
        pairs = [(order[index - 1], order[index]) for index in backwards if order[index - 1].kind == Kind.F]
        assert len(pairs) == 2 * (m - 2 * p + rank + 1) + p - rank - 1
        assert all(forward.stage != backward.stage for forward, backward in pairs)


@given(tables(4, 6, 3))
def test_an_evaluation_visits_the_same_stages(table: Table) -> None:
    forward = build_forward(table.placement, table.micro_batches)
    assert forward.placement == table.placement
    everything = {Action(Kind.F, s, i) for s in range(table.stages) for i in range(table.micro_batches)}
    assert {action for order in forward.orders for action in order} == everything
    assert all("B" not in problem.split("(")[0] or "lacks" in problem for problem in check(forward))


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 1), (4, 1, 9), (4, 2, 8), (4, 3, 7)])
def test_an_evaluation_waits_only_while_the_pipeline_fills(p: int, v: int, m: int) -> None:
    assert simulate(build_forward(tuple(range(p)) * v, m)).makespan == v * m + p - 1


@given(names, micro_batches)
def test_one_rank_needs_no_transfers(name: str, m: int) -> None:
    table = build(name, 1, m)
    assert table.placement == (0,)
    assert not any(isinstance(item, Exchange) for item in table.programs[0])


def test_stages_on_one_rank_need_no_transfers() -> None:
    """A V: the first and the last of four stages on rank 0, the middle two on rank 1."""
    order = [
        Action(kind, stage, 0) for kind, stages in ((Kind.F, range(4)), (Kind.B, range(3, -1, -1))) for stage in stages
    ]
    placement = (0, 1, 1, 0)
    orders = [[action for action in order if placement[action.stage] == rank] for rank in range(2)]
    first, second = communicate(orders, placement)
    assert short(first) == "F0 [SEND_F0] [RECV_F0] F0 B0 [SEND_B0] [RECV_B0] B0"
    assert short(second) == "[RECV_F0] F0 F0 [SEND_F0] [RECV_B0] B0 B0 [SEND_B0]"


def test_exchange_orders_its_transfers_alike_on_both_sides() -> None:
    sends = [Action(Kind.SEND_F, 0, 1), Action(Kind.SEND_B, 2, 0), Action(Kind.SEND_F, 0, 0)]
    there = Exchange(tuple(send.matching for send in sends))
    assert [action.matching for action in there.actions] == list(Exchange(tuple(reversed(sends))).actions)


def test_exchange_holds_no_compute() -> None:
    with pytest.raises(InputError, match=r"only transfers, not F\(stage 0, micro-batch 0\)"):
        Exchange((Action(Kind.F, 0, 0),))


@pytest.mark.parametrize("kind", [Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B])
def test_matching_is_mutual(kind: Kind) -> None:
    action = Action(kind, 3, 5)
    assert action.matching.matching == action
    assert action.matching.stage == action.peer_stage
    assert action.matching.transfer == action.transfer


def test_orders_that_wait_for_each_other_are_refused() -> None:
    first = [Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]
    second = [Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)]
    with pytest.raises(InputError) as caught:
        communicate([first, second], (0, 1))
    assert str(caught.value) == (
        "the pipeline schedule cannot make progress: "
        "rank 0 is stuck at B(stage 0, micro-batch 0), which needs F(stage 0, micro-batch 0) and "
        "B(stage 1, micro-batch 0); rank 1 is stuck at F(stage 1, micro-batch 0), which needs F(stage 0, micro-batch 0)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 2, 2),
            "parallel.pipeline.schedule='1f2b' is unknown; choose one of gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2, "
            "zbv, dualpipev, or the path of a schedule file that ends in .yaml or .yml",
        ),
        (("1f1b", 0, 2), "a pipeline needs at least 1 rank and 1 micro-batch, not 0 and 2"),
        (("1f1b", 2, 0), "a pipeline needs at least 1 rank and 1 micro-batch, not 2 and 0"),
        (("gpipe", 2, 2, 2), "parallel.pipeline.schedule='gpipe' has 1 stage per rank, not 2 virtual stages"),
        (("zbv", 2, 2, 1), "parallel.pipeline.schedule='zbv' has 2 stages per rank, not 1 virtual stage"),
        (("interleaved_1f1b", 2, 2, 0), "parallel.pipeline.virtual_stages=0: must be at least 1"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    table = build(name, 3, 5)
    path.write_text(write(table))
    assert build(str(path), 3, 5) == table


def test_a_file_for_other_sizes_says_which_would_do(tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(write(build("zbv", 2, 3)))
    with pytest.raises(InputError) as caught:
        build(str(path), 4, 8, 1)
    assert str(caught.value) == (
        f"parallel.pipeline.schedule={str(path)!r}: the schedule of this file is for 2 ranks, not parallel.pp=4, and "
        "for 3 micro-batches, not 8; batch.global must be 3 · batch.micro · data-parallel ranks"
    )
    with pytest.raises(InputError, match=r"for 4 stages, not parallel\.pp · parallel\.pipeline\.virtual_stages = 2"):
        build(str(path), 2, 3, 1)
