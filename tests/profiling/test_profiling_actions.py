"""Actions of profiled steps, in traces whose numbers are known."""

from typing import Any
from xml.etree import ElementTree

import pytest
from trace_cases import EVENTS, F, content, event, note

from megalite.config.layout import Layout
from megalite.profiling.actions import actions
from megalite.profiling.measured_step import MeasuredStep, measured_step
from megalite.profiling.ranks import RankProfile
from megalite.profiling.trace_file import trace_of
from megalite.schedule.actions import Action, Kind


def test_an_action_of_a_gpu_lasts_as_long_as_the_kernels_that_it_launched() -> None:
    found = [(*span.action, span.start / 1000, span.end / 1000) for span in actions(trace_of(content(EVENTS)))]
    assert found == [(Kind.F, 0, 0, 120, 420), (Kind.B, 0, 0, 420, 660)]


def entry(action: str, start: float, end: float, waiting: str = "") -> dict[str, Any]:
    return note(f"{action} (entry 1 of 2){waiting}", start, end)


def stage(rank: int, events: list[dict[str, Any]], **about: Any) -> RankProfile:
    """The steps of a pipeline rank of two: a step before, and the events of the last one."""
    before = [note("reading a batch", 0, 10), entry(F, 10, 20), note("updating the weights", 20, 90)]
    step = [note("profiled steps", 0, 900), *before, note("reading a batch", 90, 100), *events]
    after = [note("updating the weights", 800, 850), entry(F, 850, 900)]  # an evaluation
    told = content(
        [*step, *after], **{"rank": rank, "first": 4, "pp": 2, "coordinates": Layout(pp=2).coordinates(rank)} | about
    )
    return RankProfile.of(trace_of(told))


FIRST = [
    entry("F(stage 0, micro-batch 0)", 100, 200),
    entry("F(stage 0, micro-batch 1)", 200, 320),
    entry("B(stage 0, micro-batch 0)", 320, 330),
    entry("B(stage 0, micro-batch 0)", 330, 500, ", waiting for RECV_B(stage 0, micro-batch 0) from pipeline rank 1"),
    entry("B(stage 0, micro-batch 0)", 500, 600),
    entry("B(stage 0, micro-batch 1)", 600, 700),
]
LAST = [
    entry("F(stage 1, micro-batch 0)", 100, 110),
    entry("F(stage 1, micro-batch 0)", 110, 250, ", waiting for RECV_F(stage 1, micro-batch 0) from pipeline rank 0"),
    entry("F(stage 1, micro-batch 0)", 250, 300),
    note("SEND_F(stage 1, micro-batch 0) (entry 2 of 9)", 300, 301),
    entry("B(stage 1, micro-batch 0)", 301, 401),
    entry("F(stage 1, micro-batch 1)", 401, 451),
    entry("B(stage 1, micro-batch 1)", 451, 551),
]


def both(**about: Any) -> MeasuredStep:
    found = measured_step([stage(1, LAST, **about), stage(0, FIRST, **about)])
    assert found is not None
    return found


def test_actions_are_those_of_the_last_step_without_their_waits() -> None:
    found = [(str(span.action.kind), span.action.micro, span.start, span.end) for span in stage(1, LAST).actions]
    whole = [("F", 0, 250, 300), ("B", 0, 301, 401), ("F", 1, 401, 451), ("B", 1, 451, 551)]
    assert found == [(kind, micro, 1000 * start, 1000 * end) for kind, micro, start, end in whole]


def test_the_same_order_is_simulated_with_median_times() -> None:
    found = both()
    assert (found.measured.table.placement, found.measured.table.micro_batches, found.number) == ((0, 1), 2, 5)
    assert found.measured.makespan == pytest.approx(0.6)
    assert found.measured.peak_live == (2, 1)
    # F takes 0.11 on rank 0 and 0.05 on rank 1, B 0.1 on both.
    ends = {str(span.action): span.end for rank in found.simulated.own for span in rank}
    assert ends["B(stage 1, micro-batch 0)"] == pytest.approx(0.11 + 0.05 + 0.1)
    assert ends["B(stage 1, micro-batch 1)"] == pytest.approx(0.26 + 0.15)
    assert found.simulated.makespan == pytest.approx(0.41 + 0.1)
    assert "median times" in found.source


def test_a_gpus_actions_are_beside_those_predicted() -> None:
    times = [[0.001, 0.002, 0.001, 0.001], [0.002, 0.004, 0.002, 0.002]]
    expected = {"cluster": "h100", "seconds": 1.0, "parts": {}, "times": times, "transfer": 0.0005}
    kernel = [event("kernel", "gemm", 7, 1, 2)]
    found = measured_step([stage(0, FIRST + kernel, expected=expected), stage(1, LAST + kernel, expected=expected)])
    assert found is not None
    ends = {span.action: span.end for rank in found.simulated.own for span in rank}
    assert ends[Action(Kind.B, 0, 0)] == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 2)
    assert found.source == "times predicted for h100"


def test_a_pipeline_is_drawn_only_if_all_of_it_was_profiled() -> None:
    assert measured_step([stage(1, LAST)]) is None
    other = stage(0, FIRST, coordinates={**Layout().coordinates(0), "tp": 1})
    assert measured_step([stage(1, LAST), other]) is None
    assert measured_step([stage(1, LAST), stage(0, [])]) is None


def test_the_picture_has_both_timelines_of_every_rank_on_one_scale() -> None:
    found = both()
    root = ElementTree.fromstring(found.svg())
    order = ["rank 0", "simulated", "rank 1", "simulated"]
    labels = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [label for label in labels if label in order] == order
    told = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert told[0].startswith("step 5, the last profiled: 0.6 ms measured, simulated 0.51 ms with the median times")
    assert len([text for text in told if text.startswith("F: forward, stage 0, micro-batch 1")]) == 2


def test_actions_that_take_no_time_make_no_picture() -> None:
    nothing = [entry("F(stage 0, micro-batch 0)", 100, 100)], [entry("F(stage 1, micro-batch 0)", 100, 100)]
    assert measured_step([stage(rank, events) for rank, events in enumerate(nothing)]) is None
