"""What the generated schedules are."""

from typing import Any

import pytest
from hypothesis import given
from schedule_cases import micro_batches, names, ranks

from megalite.config.errors import InputError
from megalite.schedule.actions import Action, Exchange, Kind, Program
from megalite.schedule.generate import build, communicate, gpipe, one_f_one_b


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


@given(ranks, micro_batches)
def test_every_rank_takes_micro_batches_in_order(p: int, m: int) -> None:
    for orders in (gpipe(p, m), one_f_one_b(p, m)):
        for stage, order in enumerate(orders):
            for kind in (Kind.F, Kind.B):
                expected = [Action(kind, stage, micro) for micro in range(m)]
                assert [action for action in order if action.kind == kind] == expected


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
        (("1f2b", 2, 2), "parallel.pipeline.schedule='1f2b' is unknown; choose one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "a pipeline needs at least 1 rank and 1 micro-batch, not 0 and 2"),
        (("1f1b", 2, 0), "a pipeline needs at least 1 rank and 1 micro-batch, not 2 and 0"),
        (("gpipe", 2, 2, 2), "parallel.pipeline.schedule='gpipe' has 1 stage per rank, not 2 virtual stages"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(*arguments)
    assert str(caught.value) == message
