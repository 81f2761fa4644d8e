import pytest
from pipeline_cases import disagreement, evaluate, outputs_alive, watch_a_step
from ranks import Ranks

from megalite.schedule.actions import Exchange
from megalite.schedule.generate import build

CASES = pytest.mark.parametrize(
    ("pp", "schedule", "m"),
    [(pp, schedule, m) for pp in (2, 4) for schedule in ("gpipe", "1f1b") for m in (1, 2, 4, 7)],
)


@CASES
def test_losses_and_gradients_are_those_of_torch_and_of_one_process(
    pp: int, schedule: str, m: int, ranks: Ranks
) -> None:
    oracles = {"one process", "torch"} if schedule == "gpipe" or m >= pp else {"one process"}
    for told in ranks.run(disagreement, pp, schedule, m)[:pp]:
        assert told == pytest.approx(dict.fromkeys(oracles, 0.0), abs=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_is_the_same_runner(schedule: str, ranks: Ranks) -> None:
    assert ranks.run(disagreement, 1, schedule, 3)[0] == pytest.approx({"torch": 0.0, "one process": 0.0}, abs=1e-12)


@CASES
def test_a_step_keeps_its_promises(pp: int, schedule: str, m: int, ranks: Ranks) -> None:
    programs = build(schedule, pp, m).programs
    for watch, program in zip(ranks.run(watch_a_step, pp, schedule, m)[:pp], programs, strict=True):
        assert watch.peak == watch.promised
        assert watch.posted == sum(len(item.actions) for item in program if isinstance(item, Exchange))
        assert len(watch.finished) == watch.posted, "a transfer was never waited for"
        assert watch.left == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_output_sent_on_is_not_kept_for_backward(schedule: str, ranks: Ranks) -> None:
    told = ranks.run(outputs_alive, 4, schedule, 6)
    assert told[:4] == [[False] * 6] * 3 + [[]]


@pytest.mark.parametrize(("pp", "m"), [(1, 2), (2, 3), (4, 2)])
def test_evaluation_keeps_nothing_for_backward(pp: int, m: int, ranks: Ranks) -> None:
    told = ranks.run(evaluate, pp, m)[:pp]
    assert [kept for _, _, kept, _ in told] == [0] * pp
    assert not any(made for _, _, _, made in told)
    assert [loss for loss, *_ in told] == pytest.approx([expected for _, expected, *_ in told], rel=1e-12)
    assert told[-1][0] > 0
