"""How far predictions are from published runs."""

from dataclasses import replace
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import pytest
from published_cases import write

from megalite.commands.plan.near_ties import TIE_MARGIN
from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.slowest_gpu import PUBLISHED_SPREAD, slowest
from megalite_tools.plan.published.memory import UNKNOWN_MEMORY_SPREAD, fits
from megalite_tools.plan.published.profiles import UNKNOWN_SPREAD
from megalite_tools.plan.published.rows import Row, read_rows, works_of
from megalite_tools.plan.published.score import (
    Compared,
    Ranking,
    by_source,
    chosen,
    judged,
    ranking,
    score,
    timed,
    trend,
    weighed,
)

STUDY = "Hagemann et al. 2023 (AA-Scaling)"
FAR_OFF = {"Megatron-Turing NLG (Megatron-DeepSpeed)"}  # docs/planner_evidence.md, "What is not modelled"
UNKNOWN = {"Colossal-AI", "FlashAttention training code", "LitGPT", "TinyLlama"}


def test_step_times_are_predicted_as_well_as_the_documentation_says(times: list[Compared]) -> None:
    found = score(times)
    assert found is not None
    assert found.rows == 1151
    assert found.mean_abs_error < 0.06
    assert found.p90 < 0.12
    assert abs(found.bias) < 0.025
    assert 0.8 <= found.inside_interval <= 0.95


def test_no_source_is_far_off_but_those_that_the_documentation_names(times: list[Compared]) -> None:
    far = set()
    for source, group in by_source([each for each in times if each.row.program.known]).items():
        found = score(group)
        assert found is not None
        if found.mean_abs_error >= 0.11:
            far.add(source)
    assert far == FAR_OFF


def test_kernels_of_a_study_are_told_apart(times: list[Compared]) -> None:
    """Each of its kernels and kinds of recompute, for itself."""
    groups: dict[object, list[float]] = {}
    for each in (each for each in times if each.row.source == STUDY):
        program, recompute = each.row.program, each.row.work.recompute
        groups.setdefault((program.name, program.attention, program.forward, recompute), []).append(each.error)
    large = [fmean(errors) for errors in groups.values() if len(errors) >= 10]
    assert len(large) == 6
    assert all(-0.1 < bias < 0 for bias in large)


def test_an_unknown_program_has_a_wider_interval(rows: list[Row], times: list[Compared]) -> None:
    assert {each.spread for each in times if each.row.program.known} == {FITTED_CONSTANTS.spread}
    unknown = [each for each in times if not each.row.program.known]
    assert {each.row.source for each in unknown} == UNKNOWN
    assert all(each.spread == UNKNOWN_SPREAD > 2 * FITTED_CONSTANTS.spread and each.inside for each in unknown)
    memory = [each for each in weighed(rows) if not each.row.program.known]
    assert len(memory) == 2
    assert all(each.spread == UNKNOWN_MEMORY_SPREAD and each.inside for each in memory)


def test_of_unknown_micro_batches_the_fastest_that_fit_are_taken(tmp_path: Path) -> None:
    fields = {"micro_batch": "", "global_batch": "512", "tp": "1", "pp": "1", "recompute": "selective"}
    ((row,), _) = read_rows(write(tmp_path, **fields))
    sizes = [work.micro for work in works_of(row) if fits(work, row.program, row.cluster.gpu.memory)]
    assert sizes == [1, 2]
    assert chosen(row)[0].micro == 2
    ((roomy,), _) = read_rows(write(tmp_path, **fields, memory_gib="285"))
    assert chosen(roomy)[0].micro > 2


def test_memory_is_predicted_as_well_as_the_documentation_says(rows: list[Row]) -> None:
    found = weighed([row for row in rows if row.program.known])
    for kind, rows_of, error in (
        ("allocated", 12, 0.02),
        ("formula", 8, 0.001),
        ("reserved", 14, 0.07),
        ("device", 23, 0.045),
        ("unsaid", 11, 0.045),
    ):
        of = score([each for each in found if each.row.counts == kind])
        assert of is not None
        assert of.rows == rows_of
        assert of.mean_abs_error < error, kind
    whole = score(found)
    assert whole is not None
    assert 0.8 <= whole.inside_interval <= 0.95


def test_rows_that_ran_out_of_memory_are_rejected_and_others_accepted(rows: list[Row]) -> None:
    found = judged([row for row in rows if row.source != STUDY])
    out = [each for each in found if not each.row.fits]
    assert len(out) == 10
    assert all(each.right for each in out)
    assert sum(each.right for each in found) >= len(found) - 1


def test_most_rows_of_a_study_that_ran_out_of_memory_are_rejected(rows: list[Row]) -> None:
    found = judged([row for row in rows if row.source == STUDY])
    right = {fits: [each.right for each in found if each.row.fits == fits] for fits in (True, False)}
    assert (len(right[True]), len(right[False])) == (401, 563)
    assert sum(right[True]) > 0.96 * 401
    assert sum(right[False]) > 0.94 * 563


def test_a_speed_of_a_run_that_ran_out_of_memory_is_not_compared(tmp_path: Path) -> None:
    (found, _) = read_rows(write(tmp_path, status="OOM"))
    assert found[0].seconds
    assert not timed(found)
    assert not judged(found)[0].row.fits


def test_the_best_layout_is_near_the_top(times: list[Compared]) -> None:
    found = ranking(times)
    assert (found.groups, found.right) == (176, 175)
    assert (found.contested, found.contested_right) == (31, 30)


def test_one_per_cent_between_two_layouts_is_less_than_predictions_tell(times: list[Compared]) -> None:
    """How far the ratio of two layouts' predicted times is off, of one model on as many GPUs."""
    groups: dict[object, dict[object, float]] = {}
    for each in times:
        groups.setdefault(each.row.group, {})[each.row.work, each.row.program] = log(1 + each.error)
    off = [abs(a - b) for group in groups.values() for a, b in combinations(group.values(), 2)]
    assert len(off) == 11_489
    assert 0.04 < median(off) < 0.05
    assert median(off) / 2 > TIE_MARGIN


def test_a_ranking_counts_a_group_whose_best_layout_is_predicted_as_slow(tmp_path: Path) -> None:
    """Five layouts of a model, of which the slowest by far as predicted was the fastest as measured."""
    layouts = []
    for number, tp in enumerate((1, 2, 4, 8, 16)):
        fields = {"tp": str(tp), "pp": "1", "tps_per_gpu": str(6000 + 1000 * number)}
        layouts += read_rows(write(tmp_path, **fields))[0]
    assert (ranking(timed(layouts)).right, ranking(timed(layouts)).contested_right) == (0, 0)
    assert ranking(timed(layouts[:4])).contested == 1
    assert ranking(timed(layouts[:3])) == Ranking(groups=1, right=1, contested=0, contested_right=0)
    assert ranking(timed(layouts[:1])).groups == 0


def test_published_rows_tell_the_spread_that_predictions_contain(times: list[Compared]) -> None:
    found = trend(times)
    assert found is not None
    assert found.spread == pytest.approx(PUBLISHED_SPREAD, abs=5e-4)
    assert found.spread < 2 * found.error  # so that it may well be nothing
    assert found.sources == 19


def test_a_trend_is_found_again(times: list[Compared]) -> None:
    before = trend(times)
    slower = [replace(each, measured=each.measured * exp(0.03 * slowest(each.row.work.gpus))) for each in times]
    after = trend(slower)
    assert before is not None
    assert after is not None
    assert after.spread == pytest.approx(before.spread + 0.03, rel=1e-6)
    assert after.error == pytest.approx(before.error, rel=1e-6)
    assert trend([each for each in times if each.row.source == "llm-foundry MPT"]) is None
