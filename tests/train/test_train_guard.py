"""The guards: bad steps never reach the weights, all ranks agree, and what is left out is exact."""

import signal
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from guard_cases import (
    NAN,
    SPIKE,
    Outcome,
    one_infinity,
    one_nan,
    skipped,
    stopped_run,
    troubled_run,
)
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from toy_jobs import MODEL, Parts, config_of, one_rank

from megalite.base.stop_signals import restore
from megalite.checkpoint.store.manifest import complete, step_of
from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.schema import Checkpoint, Config, Log, Train
from megalite.plan.batches import GlobalBatch
from megalite.train import guard
from megalite.train.guard import MIN_DEVIATION, Judged, Requests, advanced, is_spike, rolled_back
from megalite.train.vital_signs import Reading

SMALL = replace(MODEL, layers=1)
NAME = "layers.0.mlp.down.weight"
losses = st.floats(0.1, 20)
histories = st.lists(losses, min_size=8, max_size=32)
WINDOW = Train(spike_window=32, spike_threshold=6.0)


def config(layout: Layout | None = None, **train: object) -> Config:
    layout = layout or Layout()
    base = config_of(layout, MODEL if layout.pp > 1 else SMALL)
    settings = {"steps": 8, **train}
    return replace(
        base,
        train=replace(base.train, **settings),  # type: ignore[arg-type]
        schedule=replace(base.schedule, name="constant"),
        checkpoint=Checkpoint(interval=2, keep=0),
    )


def alone(settings: Config, folder: Path, *trouble: object, start: Progress | None = None) -> Outcome:
    with one_rank():
        return troubled_run(settings, folder, trouble or None, start)


def same(one: Parts, other: Parts) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].values, other[name].values) for name in one)


def samples(*batches: int) -> list[list[int]]:
    """Of the batches, by their place in the data."""
    return [list(range(8 * batch, 8 * batch + 8)) for batch in batches]


@given(histories, losses, st.floats(0, 20))
def test_what_is_above_a_spike_is_one_and_what_is_below_the_median_is_none(
    history: list[float], loss: float, more: float
) -> None:
    if is_spike(history, loss, WINDOW):
        assert loss > median(history) * (1 + WINDOW.spike_threshold * MIN_DEVIATION) * (1 - 1e-12)
        assert is_spike(history, loss + more, WINDOW)
        assert not is_spike(history, loss, replace(WINDOW, spike_threshold=1e9))


@given(histories, losses, st.randoms())
def test_the_order_of_earlier_losses_does_not_matter(history: list[float], loss: float, random: object) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert is_spike(shuffled, loss, WINDOW) == is_spike(history, loss, WINDOW)


@given(histories, losses, st.integers(-3, 3))
def test_the_unit_of_losses_does_not_matter(history: list[float], loss: float, power: int) -> None:
    scaled = [value * 2.0**power for value in history]  # exactly
    assert is_spike(scaled, loss * 2.0**power, WINDOW) == is_spike(history, loss, WINDOW)


@given(st.lists(losses, max_size=7), losses)
def test_nothing_is_judged_by_a_few_losses(history: list[float], loss: float) -> None:
    assert not is_spike(history, loss, WINDOW)
    assert not is_spike([1.0] * 31, 1e3, Train(spike_window=128))
    assert is_spike([1.0] * 32, 1e3, Train(spike_window=128))


@given(st.lists(st.floats(2.0, 2.2), min_size=16, max_size=32), st.lists(st.floats(50, 1e3), max_size=5))
def test_a_few_spikes_among_earlier_losses_hide_none(history: list[float], spikes: list[float]) -> None:
    assert is_spike([*history, *spikes], 5.0, WINDOW)
    assert not is_spike([*history, *spikes], 2.0, WINDOW)


def test_a_spike_by_hand() -> None:
    history = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]  # median 5, median deviation 2
    limit = 5 + 6 * 1.4826 * 2
    assert [is_spike(history, limit + apart, WINDOW) for apart in (-1e-6, 1e-6)] == [False, True]
    assert [is_spike([4.0] * 8, 4.0 * (1 + 6 * 0.005) + apart, WINDOW) for apart in (-1e-6, 1e-6)] == [False, True]


def judged(verdict: str, answer: str, batch: GlobalBatch, loss: float = 1.0) -> Judged:
    return Judged(4, batch, Reading(loss, 1.0, ()), verdict, answer)  # type: ignore[arg-type]


def test_progress_counts_updates_tokens_and_bad_steps() -> None:
    settings = config(spike_window=8)
    before = Progress(3, 2, 24, 100, (), 1, tuple(map(float, range(8))))
    batch = GlobalBatch(24, 8, left_out=((30, 32),))
    good = advanced(before, judged("good", "", batch), settings)
    assert good == Progress(4, 3, 34, 164, (), 1, (*before.losses[1:], 1.0))
    assert advanced(before, judged("spike", "warn", batch), settings) == good
    assert advanced(before, judged("bad", "skip", batch), settings) == Progress(4, 2, 34, 100, (), 2, before.losses)


def test_a_rollback_leaves_out_what_it_is_told_but_nothing_before_the_checkpoint() -> None:
    saved, now = Progress(2, 2, 16, losses=(2.0,)), Progress(5, 5, 40, left_out=((16, 24),), bad_steps=3)
    bad = judged("bad", "rollback", GlobalBatch(40, 8))
    found = [rolled_back(saved, now, bad, config(rollback_skip=skip)) for skip in (1, 2, 9)]
    assert [progress.left_out for progress in found] == [((16, 24), (40, 48)), ((16, 24), (32, 48)), ((16, 48),)]
    assert {(progress.step, progress.samples, progress.losses, progress.bad_steps) for progress in found} == {
        (2, 16, (2.0,), 3)
    }


@pytest.mark.parametrize(
    ("name", "placement", "update_on"),
    [
        ("adamw", "device", "device"),
        ("adamw", "host", "host"),
        ("adamw", "host", "device"),
        ("adamw", "files", "device"),
        ("muon", "host", "device"),
        ("muon", "files", "device"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("poison", [one_nan, one_infinity])
def test_a_bad_step_changes_nothing(
    poison: object, precision: str, name: Any, placement: str, update_on: Any, tmp_path: Path
) -> None:
    base = config(precision=precision)
    placement = str(tmp_path) if placement == "files" else placement
    settings = replace(base, optim=replace(base.optim, name=name, placement=placement, update_on=update_on))
    with one_rank():
        expected = skipped(settings, 4, 2, None)
        found = skipped(settings, 4, 2, poison)  # type: ignore[arg-type]
    assert same(expected[0], found[0])
    assert found[1] == expected[1] == {3.0}


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_clipping_spreads_no_nan(limit: float) -> None:
    base = config()
    settings = replace(base, optim=replace(base.optim, clip_norm=limit))
    with one_rank():
        assert same(skipped(settings, 4, 0, None)[0], skipped(settings, 4, 0, one_nan)[0])


@pytest.mark.parametrize("layout", [Layout(pp=2, dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2, tp=2)], ids=str)
@pytest.mark.parametrize("poison", [one_nan, one_infinity])
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(layout: Layout, poison: object, ranks: Ranks) -> None:
    expected = ranks.run(skipped, config(layout), 3, 1, None)
    found = ranks.run(skipped, config(layout), 3, 1, poison if layout.pp > 1 else one_nan)
    for one, other in zip(expected, found, strict=True):
        assert same(one[0], other[0])
        assert other[1] == {2.0}


def test_a_bad_step_stops_the_run_and_says_why(tmp_path: Path) -> None:
    found = alone(config(), tmp_path, NAN, 27, NAME)
    assert found.error == (
        "step 4, samples 24 to 31: loss 3.479, gradient norm nan; not finite: the gradients of "
        f"{NAME}; use train.on_bad_step=skip or rollback to go past it"
    )
    assert [step_of(path) for path in complete(tmp_path)] == [2]


def test_all_ranks_name_the_parameter_that_one_has_seen(tmp_path: Path, ranks: Ranks) -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    name = "layers.1.mlp.down.weight"
    found = ranks.run(troubled_run, config(layout), tmp_path, (NAN, 27, name, 7))
    assert len({outcome.error for outcome in found}) == 1
    assert f"the gradients of {name};" in found[0].error
    assert found[0].error.startswith("step 4, samples 24 to 31: ")


def test_a_skipped_step_takes_its_samples_and_is_recorded(tmp_path: Path) -> None:
    found = alone(config(on_bad_step="skip"), tmp_path, NAN, 27, NAME)
    assert found.asked == samples(*range(8))
    assert found.updates == {7.0}
    (event,) = found.notes.named("bad_step")
    assert event[0] == 4
    assert event[1]["samples"] == [24, 32]
    assert event[1]["parameters"] == (NAME,)
    tokens = found.notes.curve("tokens")
    assert [tokens[step] for step in (3, 4, 5, 8)] == [192, 192, 256, 448]
    resumed = alone(config(on_bad_step="skip", steps=9), tmp_path)
    assert (resumed.updates, resumed.asked) == ({8.0}, samples(8))


def test_a_report_leaves_bad_steps_out_of_the_mean(tmp_path: Path) -> None:
    base = config(on_bad_step="skip")
    each = alone(base, tmp_path / "each", NAN, 27, NAME).notes.curve("loss")
    assert each.pop(4) != each[3]
    some = alone(replace(base, log=replace(base.log, interval=4)), tmp_path / "some", NAN, 27, NAME).notes.curve("loss")
    assert some == pytest.approx({4: sum(each[step] for step in (1, 2, 3)) / 3, 8: sum(list(each.values())[3:]) / 4})


@pytest.mark.parametrize(("skip", "left_out"), [(1, (3,)), (2, (2, 3)), (5, (2, 3))])
def test_a_rollback_is_a_run_that_was_told_to_leave_out_these_samples(
    skip: int, left_out: tuple[int, ...], tmp_path: Path
) -> None:
    settings = config(on_bad_step="rollback", rollback_skip=skip)
    found = alone(settings, tmp_path / "found", NAN, 27, NAME)
    ranges = ((8 * left_out[0], 32),)
    start = Progress(2, 2, 16, 128, ranges)
    with one_rank():
        told = troubled_run(settings, tmp_path / "told", None, start, complete(tmp_path / "found")[0])
    assert told.asked == [batch for batch in samples(*range(2, 10)) if batch not in samples(*left_out)][:6]
    assert same(found.parts, told.parts)
    for name in ("loss", "grad_norm", "tokens"):
        curve, expected = found.notes.curve(name), told.notes.curve(name)
        assert {step: curve[step] for step in range(3, 9)} == expected
    assert found.notes.named("rollback") == [(2, {"taken_back": 4, "left_out": ranges})]


def test_ranks_roll_back_together(tmp_path: Path, ranks: Ranks) -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    settings = config(layout, on_bad_step="rollback", steps=5)
    name = "layers.1.mlp.down.weight"
    found = ranks.run(troubled_run, settings, tmp_path, (NAN, 27, name, 7))
    assert {outcome.error for outcome in found} == {""}
    assert all(outcome.updates == {5.0} for outcome in found)
    assert all(outcome.asked[-3:] == samples(2, 4, 5) for outcome in found)


def test_without_a_checkpoint_there_is_no_way_back(tmp_path: Path) -> None:
    found = alone(config(on_bad_step="rollback"), tmp_path, NAN, 11, NAME)
    assert found.error.startswith("step 2, samples 8 to 15: ")
    assert "no checkpoint yet to roll back to" in found.error


@pytest.mark.parametrize("answer", ["skip", "rollback"])
def test_bad_steps_are_bounded_in_a_run(answer: str, tmp_path: Path) -> None:
    settings = config(on_bad_step=answer, max_bad_steps=1)
    first = alone(settings, tmp_path, NAN, 27, NAME)
    assert first.error == ""
    again = alone(replace(settings, train=replace(settings.train, steps=12)), tmp_path, NAN, 75, NAME)
    assert "this is bad step 2 of the run, and train.max_bad_steps = 1 allows no more" in again.error
    resumed = alone(config(on_bad_step=answer, max_bad_steps=0, steps=9), tmp_path)
    assert resumed.error == "", "those before count against those to come only"


def test_a_spike_is_told_and_trained_on(tmp_path: Path) -> None:
    settings = config(steps=12, spike_window=8)
    plain = alone(settings, tmp_path / "plain")
    found = alone(settings, tmp_path / "found", SPIKE, 83)
    assert plain.notes.named("spike") == []
    ((step, details),) = found.notes.named("spike")
    assert (step, details["samples"], details["answer"]) == (11, [80, 88], "warn")
    assert same(plain.parts, found.parts)
    ignored = alone(replace(settings, train=replace(settings.train, on_spike="ignore")), tmp_path / "x", SPIKE, 83)
    assert ignored.notes.named("spike") == []


def test_a_spike_is_judged_alike_after_a_resumption(tmp_path: Path) -> None:
    settings = config(steps=12, spike_window=8)
    alone(replace(settings, train=replace(settings.train, steps=10)), tmp_path)
    resumed = alone(settings, tmp_path, SPIKE, 83)
    assert [step for step, _ in resumed.notes.named("spike")] == [11]


def test_a_spike_can_be_rolled_back_and_counts(tmp_path: Path) -> None:
    settings = config(steps=12, spike_window=8, on_spike="rollback", max_bad_steps=1)
    found = alone(settings, tmp_path / "found", SPIKE, 83)
    assert found.asked == samples(*range(12), 11, 12)
    assert found.notes.named("rollback") == [(10, {"taken_back": 11, "left_out": ((80, 88),)})]
    bounded = alone(replace(settings, train=replace(settings.train, max_bad_steps=0)), tmp_path / "none", SPIKE, 83)
    assert "train.max_bad_steps = 0" in bounded.error


@pytest.mark.parametrize("answer", ["stop", "skip", "rollback"])
def test_verdicts_that_come_a_step_late_as_on_a_gpu_lead_to_the_same_run(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(config(on_bad_step=answer), checkpoint=Checkpoint(interval=4, keep=0), log=Log(interval=8))
    at_once = alone(settings, tmp_path / "at once", NAN, 43, NAME)
    monkeypatch.setattr(guard, "left_under_way", lambda _: 1)
    late = alone(settings, tmp_path / "late", NAN, 43, NAME)
    assert (at_once.notes.curve("loss"), at_once.error) == (late.notes.curve("loss"), late.error)
    for name in ("bad_step", "rollback"):
        assert str(at_once.notes.named(name)) == str(late.notes.named(name))  # which hold NaN
    assert len(late.notes.named("rollback")) == (answer == "rollback")
    if answer != "stop":  # there, a step more has been taken, which nobody saves
        assert same(at_once.parts, late.parts)


def test_a_request_that_is_seen_a_step_late_is_obeyed_after_the_step_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "left_under_way", lambda _: 1)
    settings = replace(config(), checkpoint=Checkpoint(interval=8), log=Log(interval=8))
    with one_rank():
        code, said = stopped_run(settings, tmp_path, signal.SIGTERM, 2, 0)
    assert (code, said[-1].partition(",")[0]) == (3, "stopped by SIGTERM after step 4")
    assert alone(settings, tmp_path).asked == samples(4, 5, 6, 7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    with one_rank():
        code, said = stopped_run(config(), tmp_path, number, 3, 0)
    assert code == 3
    assert said[-1] == f"stopped by {number.name} after step 4, which is saved; the same command continues"
    assert [step_of(path) for path in complete(tmp_path)] == [2, 4]
    assert alone(config(), tmp_path).asked == samples(4, 5, 6, 7)


def test_a_request_during_the_last_step_changes_nothing(tmp_path: Path) -> None:
    with one_rank():
        code, said = stopped_run(config(), tmp_path, signal.SIGTERM, 8, 0)
    assert code == 0
    assert not any("stopped" in text for text in said)


def test_a_second_interrupt_stops_at_once() -> None:
    requests = Requests()
    before = requests.listen()
    try:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert requests.received == {signal.SIGTERM, signal.SIGINT}
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        restore(before)
