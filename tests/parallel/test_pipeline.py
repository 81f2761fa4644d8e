from pathlib import Path

import pytest
import torch
from pipeline_cases import disagreement, evaluate, outputs_alive, watch_a_step
from ranks import Ranks

from megalite.schedule.actions import Exchange, Table
from megalite.schedule.file import write
from megalite.schedule.generate import build
from megalite.schedule.orders import one_f_one_b

STAGES = {"gpipe": (None,), "1f1b": (None,), "interleaved_1f1b": (2, 3), "zb_h1": (None,), "zb_h2": (None,)}
STAGES |= {"zbv": (None,), "dualpipev": (None,)}
CASES = pytest.mark.parametrize(
    ("pp", "schedule", "m", "v"),
    [(pp, schedule, m, v) for pp in (2, 4) for schedule, sizes in STAGES.items() for v in sizes for m in (1, 4, 9)],
)


def torch_can(pp: int, schedule: str, m: int) -> bool:
    """Whether torch's schedule of that name takes as many micro-batches; it has no ZB-H1 and ZB-H2."""
    match schedule:
        case "gpipe":
            return True
        case "1f1b":
            return m >= pp
        case "zbv" | "dualpipev" if torch.__version__ < (2, 12):  # it sends to its own rank, which gloo cannot
            return False
        case "zbv":
            return m >= pp
        case "interleaved_1f1b":
            return m % pp == 0
        case "dualpipev":
            return m >= 2 * pp
    return False


@CASES
def test_losses_and_gradients_are_those_of_torch_and_of_one_process(
    pp: int, schedule: str, m: int, v: int | None, ranks: Ranks
) -> None:
    with_torch = torch_can(pp, schedule, m)
    oracles = {"one process", "torch"} if with_torch else {"one process"}
    for told in ranks.run(disagreement, pp, schedule, m, v, with_torch)[:pp]:
        assert told == pytest.approx(dict.fromkeys(oracles, 0.0), abs=1e-12)


@pytest.mark.parametrize("m", [3, 5])
def test_an_odd_number_of_ranks_has_a_group_for_its_two_ends(m: int, ranks: Ranks) -> None:
    for told in ranks.run(disagreement, 3, "interleaved_1f1b", m, 2, False)[:3]:
        assert told == pytest.approx({"one process": 0.0}, abs=1e-12)


def test_stages_may_follow_one_another_on_ranks_that_are_no_neighbours(ranks: Ranks, tmp_path: Path) -> None:
    placement, path = (0, 2, 1, 3), tmp_path / "mine.yaml"
    orders = tuple(one_f_one_b(4, 5)[placement.index(rank)] for rank in range(4))
    path.write_text(write(Table("mine", 5, placement, orders)))
    for told in ranks.run(disagreement, 4, str(path), 5, None, False)[:4]:
        assert told == pytest.approx({"one process": 0.0}, abs=1e-12)


@pytest.mark.parametrize("schedule", STAGES)
def test_one_rank_is_the_same_runner(schedule: str, ranks: Ranks) -> None:
    assert ranks.run(disagreement, 1, schedule, 3, None, False)[0] == pytest.approx({"one process": 0.0}, abs=1e-12)


@pytest.mark.parametrize("schedule", STAGES)
def test_every_stage_may_add_to_the_loss(schedule: str, ranks: Ranks) -> None:
    for told in ranks.run(disagreement, 2, schedule, 4, None, False, 0.3)[:2]:
        assert told == pytest.approx({"one process": 0.0}, abs=1e-12)


@CASES
def test_a_step_keeps_its_promises(pp: int, schedule: str, m: int, v: int | None, ranks: Ranks) -> None:
    programs = build(schedule, pp, m, v).programs
    for watch, program in zip(ranks.run(watch_a_step, pp, schedule, m, v)[:pp], programs, strict=True):
        assert watch.peak == watch.promised
        assert watch.posted == sum(len(item.actions) for item in program if isinstance(item, Exchange))
        assert len(watch.finished) == watch.posted, "a transfer was never waited for"
        assert watch.received <= min(m, 2 * pp), "receive buffers are there long before their use"
        assert watch.left == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_output_sent_on_is_not_kept_for_backward(schedule: str, ranks: Ranks) -> None:
    told = ranks.run(outputs_alive, 4, schedule, 6)
    assert told[:4] == [[False] * 6] * 3 + [[]]


@pytest.mark.parametrize(
    ("pp", "m", "schedule"), [(1, 2, "1f1b"), (2, 3, "zbv"), (4, 2, "zb_h1"), (4, 5, "interleaved_1f1b")]
)
def test_evaluation_keeps_nothing_for_backward(pp: int, m: int, schedule: str, ranks: Ranks) -> None:
    told = ranks.run(evaluate, pp, m, schedule)[:pp]
    assert [kept for _, _, kept, _ in told] == [0] * pp
    assert not any(made for _, _, _, made in told)
    assert [loss for loss, *_ in told] == pytest.approx([expected for _, expected, *_ in told], rel=1e-12)
    assert max(loss for loss, *_ in told) > 0
