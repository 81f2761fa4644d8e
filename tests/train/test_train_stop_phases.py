"""One rank of many is asked to stop, in every phase of a run: all stop together, and nothing else changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from stop_cases import phase_run
from toy_jobs import Parts, config_of

from megalite.checkpoint.store.manifest import complete, step_of
from megalite.config.layout import Layout
from megalite.config.schema import Checkpoint, Config, Eval

RANK = 5
CURVES = ("loss", "grad_norm", "valid_loss")


def config() -> Config:
    base = config_of(Layout(pp=2, dp_shard=2, tp=2))
    return replace(base, eval=Eval(interval=3, steps=4), checkpoint=Checkpoint(interval=3, keep=0))


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[int, float]], Parts]:
    """The curves of a run, and rank 0's weights and moments after it."""
    notes, parts = ranks.run(phase_run, config(), tmp_path_factory.mktemp("undisturbed"), "forward", -1, RANK)[0]
    assert notes.code == 0
    return {name: notes.curve(name) for name in CURVES}, parts


@pytest.mark.parametrize(
    ("phase", "at", "stops", "cut"),
    [
        ("evaluation", 1, 0, [0]),  # the first, before the first step
        ("a schedule is made", 1, 1, []),  # the second time, in the first step
        ("forward", 9, 1, []),  # of the first step, after 8 of the evaluation
        ("forward", 13, 3, [3]),  # in the third step, after which an evaluation is due
        ("evaluation", 5, 3, [3]),
        ("staging", 0, 4, []),
        ("writing", 0, 4, []),
        ("evaluation", 9, 6, [6]),  # the last
    ],
)
def test_a_request_in_any_phase_costs_a_step_and_a_save_at_most(
    phase: str,
    at: int,
    stops: int,
    cut: list[int],
    ranks: Ranks,
    undisturbed: tuple[dict[str, dict[int, float]], Parts],
    tmp_path: Path,
) -> None:
    expected, weights = undisturbed
    found = ranks.run(phase_run, config(), tmp_path, phase, at, RANK)
    assert {notes.code for notes, _ in found} == {0 if stops == 6 else 3}
    notes = found[0][0]
    assert max(notes.curve("loss"), default=0) == stops
    assert [step for step, _ in notes.named("evaluation_cut")] == cut
    assert all(details == {"signals": ("SIGUSR2",)} for _, details in notes.named("evaluation_cut"))
    assert [step_of(path) for path in complete(tmp_path)] == sorted({3, 6, stops} & set(range(1, stops + 1)))
    later = ranks.run(phase_run, config(), tmp_path, phase, -1, RANK)
    assert {notes.code for notes, _ in later} == {0}
    for name in CURVES:
        together = notes.curve(name) | later[0][0].curve(name)
        left_out = () if stops == 0 or name != "valid_loss" else cut
        assert together == {step: value for step, value in expected[name].items() if step not in left_out}
    if stops < 6:
        assert all(torch.equal(part.values, weights[name].values) for name, part in later[0][1].items())


def test_a_request_is_heard_where_an_evaluation_is_due_that_has_no_batches(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(phase_run, replace(config(), eval=Eval(interval=1, steps=0)), tmp_path, "forward", 1, RANK)
    assert {notes.code for notes, _ in found} == {3}
    assert max(found[0][0].curve("loss")) == 1
